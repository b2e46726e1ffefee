"""Hymba against a second forward, written here from the paper, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kl_lens.model import Chain, architectures as models
from kl_lens.model.architectures.hymba import HymbaConfig, HymbaForCausalLM
from tests.families import tiny_model, token_ids
from tests.model.test_kernels import recurrence


def straightforward_logits(model: HymbaForCausalLM, ids: list[int]) -> Tensor:
    """One sequence, nothing shared with the code under test but the names of the weights."""
    c = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    heads = c.num_attention_heads
    groups = heads // c.num_key_value_heads
    width = c.hidden_size // heads
    inner = 2 * c.hidden_size
    longer = 2 * c.max_position_embeddings / c.orig_max_position_embeddings - 1
    base = c.rope_theta * longer ** (width / (width - 2))
    meta = len(w["model.memory_tokens"])
    x = torch.cat([w["model.memory_tokens"], w["model.embed_tokens.weight"][ids]])
    time = torch.arange(len(x))
    distance = time[:, None] - time
    near = (distance <= c.sliding_window) | (time < meta)
    producer = {layer: group[0] for group in c.kv_reuse_group for layer in group}
    shared = {}

    def norm(y: Tensor, name: str) -> Tensor:
        return w[name] * y / (y.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()

    def turned(flat: Tensor) -> Tensor:
        """Rotary embedding of each head at each position, pair by pair."""
        first, second = flat.unflatten(-1, (-1, width)).chunk(2, -1)
        exponents = torch.arange(0, width, 2).double() / width
        angle = time[:, None, None] * base**-exponents
        sine = angle.sin()
        cosine = angle.cos()
        turn = [first * cosine - second * sine, second * cosine + first * sine]
        return torch.cat(turn, -1)

    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        m = p + "mamba."
        mixed = norm(x, p + "input_layernorm.weight") @ w[m + "in_proj.weight"].T
        source = producer.get(layer, layer)
        sizes = [c.hidden_size, inner, inner]
        if source == layer:
            sizes[1:1] = [c.hidden_size // groups, inner // groups]
        query, *keys_values, u, gate = mixed.split(sizes, -1)
        if source == layer:
            values = keys_values[1].unflatten(-1, (-1, inner // heads))
            shared[layer] = [turned(keys_values[0]), values]
        keys, values = (part.repeat_interleave(groups, 1) for part in shared[source])
        scores = torch.einsum("thw,shw->hts", turned(query), keys) / width**0.5
        heard = (distance >= 0) & (near | (layer in c.global_attn_idx))
        share = scores.masked_fill(~heard, -torch.inf).softmax(-1)
        attended = torch.einsum("hts,shv->thv", share, values).flatten(1)

        padded = functional.pad(u, (0, 0, c.mamba_d_conv - 1, 0))
        taps = w[m + "conv1d.weight"][:, 0].T
        u = w[m + "conv1d.bias"] + sum(
            tap * padded[k : k + len(x)] for k, tap in enumerate(taps)
        )
        u = functional.silu(u)
        step, b, out = (
            norm(part, f"{m}{name}_layernorm.weight")
            for name, part in zip(
                ("dt", "B", "C"),
                (u @ w[m + "x_proj.0.weight"].T).split(
                    [c.mamba_dt_rank, c.mamba_d_state, c.mamba_d_state], -1
                ),
                strict=True,
            )
        )
        step = step @ w[m + "dt_proj.0.weight"].T + w[m + "dt_proj.0.bias"]
        step = functional.softplus(step)
        rates = -w[m + "A_log.0"].exp()
        scanned = recurrence(u[None], step[None], rates, b[None], out[None])[0]
        scanned = (scanned + w[m + "D.0"] * u) * functional.silu(gate)

        both = norm(attended, m + "pre_avg_layernorm1.weight")
        both = both + norm(scanned, m + "pre_avg_layernorm2.weight")
        x = x + both / 2 @ w[m + "out_proj.weight"].T
        fed = norm(x, p + "pre_moe_layernorm.weight")
        e = p + "moe.experts.0."
        gated = functional.silu(fed @ w[e + "gate_proj.weight"].T)
        x = x + gated * (fed @ w[e + "up_proj.weight"].T) @ w[e + "down_proj.weight"].T
    last = norm(x[meta:], "model.final_layernorm.weight")
    return last @ w["model.embed_tokens.weight"].T


@pytest.fixture(scope="module")
def model() -> HymbaForCausalLM:
    return tiny_model("hymba")


@pytest.fixture(scope="module")
def expected(model: HymbaForCausalLM) -> Tensor:
    return straightforward_logits(model, token_ids(1, 20)[0].tolist())


@pytest.mark.parametrize("fast", [False, True])
def test_the_logits_are_those_of_a_straightforward_forward(
    model, expected, fast: bool
) -> None:
    logits = Chain(model, fast=fast).full_logits(token_ids(1, 20))[0]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_published_shapes() -> None:
    """Hymba-1.5B: 32 layers, three of them global, neighbours that share keys and values."""
    pairs = [[i, i + 1] for i in (*range(1, 15, 2), *range(19, 31, 2))]
    config = HymbaConfig(
        global_attn_idx=[0, 15, 31], kv_reuse_group=[*pairs, [16, 17, 18]]
    )
    models.register(models.HYMBA)
    with torch.device("meta"):
        published = HymbaForCausalLM(config)
    shapes = {name: tuple(p.shape) for name, p in published.named_parameters()}
    assert shapes["model.layers.0.mamba.in_proj.weight"] == (
        8960,
        1600,
    )  # q 1600, k 320, v 640, 2 × 3200
    assert shapes["model.layers.2.mamba.in_proj.weight"] == (8000, 1600)
    assert shapes["model.layers.31.mamba.x_proj.0.weight"] == (132, 3200)
    assert shapes["model.layers.31.mamba.dt_proj.0.weight"] == (3200, 100)
    assert shapes["model.memory_tokens"] == (128, 1600)
    total = sum(p.numel() for p in published.parameters())
    assert 1.51e9 < total < 1.53e9, "1.52 billion, as its card says"
