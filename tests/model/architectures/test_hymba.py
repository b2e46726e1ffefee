"""Hymba against a second forward, written here from the paper: token by token, head by head, in float64."""

import numpy as np
import pytest
import torch

from kl_lens.model import Chain, architectures as models
from kl_lens.model.architectures.hymba import HymbaConfig, HymbaForCausalLM
from tests.families import tiny_model, token_ids


def norm(x, weight, epsilon):
    return weight * x / np.sqrt((x * x).mean() + epsilon)


def silu(x):
    return x / (1 + np.exp(-x))


def turned(head, position, base):
    """Rotary embedding of one head at one position, pair by pair."""
    half = len(head) // 2
    out = np.empty_like(head)
    for i in range(half):
        angle = position * base ** (-2 * i / len(head))
        out[i] = head[i] * np.cos(angle) - head[i + half] * np.sin(angle)
        out[i + half] = head[i + half] * np.cos(angle) + head[i] * np.sin(angle)
    return out


def straightforward_logits(model: HymbaForCausalLM, ids: list[int]) -> np.ndarray:
    """One sequence, nothing shared with the code under test but the names of the weights."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    heads = c.num_attention_heads
    groups = c.num_attention_heads // c.num_key_value_heads
    width = c.hidden_size // heads
    inner = 2 * c.hidden_size
    states = c.mamba_d_state
    base = c.rope_theta * (
        2 * c.max_position_embeddings / c.orig_max_position_embeddings - 1
    ) ** (width / (width - 2))
    meta = len(w["model.memory_tokens"])
    stream = [
        *w["model.memory_tokens"],
        *(w["model.embed_tokens.weight"][i] for i in ids),
    ]
    producer = {layer: group[0] for group in c.kv_reuse_group for layer in group}
    keys_of = {}
    values_of = {}
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        source_layer = producer.get(layer, layer)
        keys = keys_of.setdefault(source_layer, [])
        values = values_of.setdefault(source_layer, [])
        state = np.zeros((inner, states))
        recent = [np.zeros(inner)] * c.mamba_d_conv
        for position, x in enumerate(stream):
            mixed = w[p + "mamba.in_proj.weight"] @ norm(
                x, w[p + "input_layernorm.weight"], c.rms_norm_eps
            )
            query = mixed[: c.hidden_size].reshape(heads, width)
            remainder = mixed[c.hidden_size :]
            if source_layer == layer:
                k = c.hidden_size // groups
                v = inner // groups
                keys.append(
                    [turned(h, position, base) for h in remainder[:k].reshape(-1, width)]
                )
                values.append(remainder[k : k + v].reshape(-1, inner // heads))
                remainder = remainder[k + v :]
            u = remainder[:inner]
            gate = remainder[inner:]

            attended = []
            for head in range(heads):
                q = turned(query[head], position, base)
                scores = []
                heard = []
                for earlier in range(position + 1):
                    near = position - earlier <= c.sliding_window or earlier < meta
                    if layer in c.global_attn_idx or near:
                        scores.append(q @ keys[earlier][head // groups] / np.sqrt(width))
                        heard.append(values[earlier][head // groups])
                share = np.exp(np.array(scores) - max(scores))
                attended.extend(share / share.sum() @ np.array(heard))

            recent = [*recent[1:], u]
            u = w[p + "mamba.conv1d.bias"] + sum(
                tap * past
                for tap, past in zip(
                    w[p + "mamba.conv1d.weight"][:, 0].T, recent, strict=True
                )
            )
            u = silu(u)
            step, b, out = np.split(
                w[p + "mamba.x_proj.0.weight"] @ u,
                [c.mamba_dt_rank, c.mamba_dt_rank + states],
            )
            step, b, out = (
                norm(value, w[p + f"mamba.{name}_layernorm.weight"], c.rms_norm_eps)
                for name, value in (("dt", step), ("B", b), ("C", out))
            )
            dt = np.log1p(
                np.exp(
                    w[p + "mamba.dt_proj.0.weight"] @ step + w[p + "mamba.dt_proj.0.bias"]
                )
            )
            for channel in range(inner):
                decay = np.exp(-dt[channel] * np.exp(w[p + "mamba.A_log.0"][channel]))
                state[channel] = decay * state[channel] + dt[channel] * u[channel] * b
            scanned = (state @ out + w[p + "mamba.D.0"] * u) * silu(gate)

            averaged = norm(
                np.array(attended),
                w[p + "mamba.pre_avg_layernorm1.weight"],
                c.rms_norm_eps,
            )
            averaged = averaged + norm(
                scanned, w[p + "mamba.pre_avg_layernorm2.weight"], c.rms_norm_eps
            )
            x = x + w[p + "mamba.out_proj.weight"] @ (averaged / 2)
            fed = norm(x, w[p + "pre_moe_layernorm.weight"], c.rms_norm_eps)
            e = p + "moe.experts.0."
            fed = silu(w[e + "gate_proj.weight"] @ fed) * (w[e + "up_proj.weight"] @ fed)
            stream[position] = x + w[e + "down_proj.weight"] @ fed
    last = [
        norm(x, w["model.final_layernorm.weight"], c.rms_norm_eps) for x in stream[meta:]
    ]
    return np.array(last) @ w["model.embed_tokens.weight"].T


@pytest.fixture(scope="module")
def model() -> HymbaForCausalLM:
    return tiny_model("hymba")


@pytest.fixture(scope="module")
def expected(model: HymbaForCausalLM) -> np.ndarray:
    return straightforward_logits(model, token_ids(1, 20)[0].tolist())


@pytest.mark.parametrize("fast", [False, True])
def test_the_logits_are_those_of_a_straightforward_forward(
    model, expected, fast: bool
) -> None:
    logits = Chain(model, fast=fast).full_logits(token_ids(1, 20))[0].double().numpy()
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


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
