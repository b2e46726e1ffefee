"""Pieces that several architectures share: state-space layers, attention, experts, and their transforms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kl_lens.targets.gguf.architectures.base import (
    Metadata,
    Shapes,
    TensorRule,
    Transform,
    as_is,
)

# -- transforms ------------------------------------------------------------------------------------------


def negative_exponential(tensor: torch.Tensor) -> torch.Tensor:
    """A_log → A, in float32: in half precision, the decay of the states would change visibly."""
    return -torch.exp(tensor.float())


def column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1)


def negative_exponential_column(tensor: torch.Tensor) -> torch.Tensor:
    return column(negative_exponential(tensor))


def squeezed_convolution(tensor: torch.Tensor) -> torch.Tensor:
    """(channels, 1, taps) → (channels, taps)."""
    return tensor.reshape(tensor.shape[0], tensor.shape[-1])


def in_groups(groups: int) -> Transform:
    return lambda tensor: tensor.reshape(groups, -1)


def half(index: int) -> Transform:
    """The first or second half of the rows: gate and up are stored as one matrix."""
    return lambda tensor: tensor.chunk(2, dim=-2)[index]


def interleaved_heads(heads: int, rotary: int) -> Transform:
    """Rows of each head from (first halves, second halves) to pairs, for the dimensions that rotate.

    transformers rotates dimension i with i + rotary/2; llama.cpp's plain rope rotates 2i with 2i + 1.
    """

    def reorder(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0]
        size = rows // heads
        pairs = torch.arange(rotary).reshape(2, -1).T.reshape(-1)
        order = torch.cat([pairs, torch.arange(rotary, size)])
        index = (torch.arange(heads)[:, None] * size + order).reshape(-1)
        return tensor[index.to(tensor.device)]

    return reorder


# -- metadata --------------------------------------------------------------------------------------------


def head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )


def sizes(config: Any, feed_forward: int) -> Metadata:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": feed_forward,
        "block_count": config.num_hidden_layers,
    }


def hybrid_metadata(config: Any, inner: int, rank: int) -> Metadata:
    """Metadata of every hybrid of attention and state-space layers; `rank`: of the time steps, or the heads."""
    return {
        **sizes(config, config.intermediate_size),
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": inner,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": rank,
    }


def rope_base(config: Any) -> float:
    return float(
        (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    )


# -- groups of tensors -----------------------------------------------------------------------------------


def ends(embedding: str, norm: str, head: str, shapes: Shapes) -> list[TensorRule]:
    """Embedding, final norm, and the head unless it is tied to the embedding."""
    rules = [
        TensorRule("token_embd.weight", embedding),
        TensorRule("output_norm.weight", norm, float32=True),
    ]
    if head in shapes:
        rules.append(TensorRule("output.weight", head))
    return rules


def norms(
    block: str, layer: str, names: Mapping[str, str], transform: Transform = as_is
) -> list[TensorRule]:
    """`names`: of the norms in llama.cpp → in transformers."""
    return [
        TensorRule(
            f"{block}.{name}.weight", f"{layer}.{own}.weight", transform, float32=True
        )
        for name, own in names.items()
    ]


def matrices(block: str, layer: str, names: Mapping[str, str]) -> list[TensorRule]:
    """`names`: of the matrices in llama.cpp → in transformers."""
    return [
        TensorRule(f"{block}.{name}.weight", f"{layer}.{own}.weight")
        for name, own in names.items()
    ]


def convolution(block: str, mixer: str, shapes: Shapes) -> list[TensorRule]:
    weight = f"{mixer}.conv1d.weight"
    bias = f"{mixer}.conv1d.bias"
    rules = [
        TensorRule(
            f"{block}.ssm_conv1d.weight", weight, squeezed_convolution, float32=True
        )
    ]
    if bias in shapes:
        rules.append(TensorRule(f"{block}.ssm_conv1d.bias", bias, float32=True))
    else:  # llama.cpp always adds one
        channels = shapes[weight][:1] if weight in shapes else (0,)
        rules.append(
            TensorRule(f"{block}.ssm_conv1d.bias", None, float32=True, shape=channels)
        )
    return rules


def mamba1_layer(block: str, mixer: str, shapes: Shapes) -> list[TensorRule]:
    return [
        *matrices(block, mixer, {"ssm_in": "in_proj"}),
        *convolution(block, mixer, shapes),
        *matrices(block, mixer, {"ssm_x": "x_proj", "ssm_dt": "dt_proj"}),
        TensorRule(f"{block}.ssm_dt.bias", f"{mixer}.dt_proj.bias", float32=True),
        TensorRule(
            f"{block}.ssm_a", f"{mixer}.A_log", negative_exponential, float32=True
        ),
        TensorRule(f"{block}.ssm_d", f"{mixer}.D", float32=True),
        *matrices(block, mixer, {"ssm_out": "out_proj"}),
    ]


def mamba2_layer(
    block: str, mixer: str, groups: int, shapes: Shapes, *, norm: bool = True
) -> list[TensorRule]:
    return [
        *matrices(block, mixer, {"ssm_in": "in_proj"}),
        *convolution(block, mixer, shapes),
        TensorRule(f"{block}.ssm_dt.bias", f"{mixer}.dt_bias", float32=True),
        TensorRule(
            f"{block}.ssm_a", f"{mixer}.A_log", negative_exponential_column, float32=True
        ),
        TensorRule(f"{block}.ssm_d", f"{mixer}.D", column, float32=True),
        *matrices(block, mixer, {"ssm_out": "out_proj"}),
        *(norms(block, mixer, {"ssm_norm": "norm"}, in_groups(groups)) if norm else ()),
    ]


def attention_layer(
    block: str, attention: str, *, query: Transform = as_is, key: Transform = as_is
) -> list[TensorRule]:
    return [
        TensorRule(f"{block}.attn_q.weight", f"{attention}.q_proj.weight", query),
        TensorRule(f"{block}.attn_k.weight", f"{attention}.k_proj.weight", key),
        *matrices(block, attention, {"attn_v": "v_proj", "attn_output": "o_proj"}),
    ]


def gated_mlp(block: str, mlp: str, *, suffix: str = "") -> list[TensorRule]:
    return matrices(
        block,
        mlp,
        {f"ffn_{part}{suffix}": f"{part}_proj" for part in ("gate", "up", "down")},
    )


def gated_experts(block: str, router: str, experts: str) -> list[TensorRule]:
    """A router and experts whose gate and up matrices are one parameter."""
    return [
        TensorRule(f"{block}.ffn_gate_inp.weight", router, float32=True),
        TensorRule(f"{block}.ffn_gate_exps.weight", f"{experts}.gate_up_proj", half(0)),
        TensorRule(f"{block}.ffn_up_exps.weight", f"{experts}.gate_up_proj", half(1)),
        TensorRule(f"{block}.ffn_down_exps.weight", f"{experts}.down_proj"),
    ]


# -- reasons to refuse -----------------------------------------------------------------------------------


def refusals(
    config: Any, *biases: str, rope: bool = True, steps: bool = True
) -> Iterator[str]:
    """Biases, activations, limits of time steps and rope scaling that llama.cpp does not compute."""
    for name in biases:
        if getattr(config, name, False):
            yield f"it has biases ({name}), for which llama.cpp has no tensors"
    silu = ("silu", "swish")
    for name, known in {
        "hidden_act": silu,
        "mamba_hidden_act": silu,
        "mlp_hidden_act": ("relu2",),
    }.items():
        if (activation := getattr(config, name, known[0])) not in known:
            yield f"its activation {activation!r} is not llama.cpp's {known[0]!r}"
    limits = tuple(getattr(config, "time_step_limit", None) or (0.0, math.inf))
    if steps and limits != (0.0, math.inf):
        yield f"it limits time steps to {limits}, but llama.cpp does not limit them"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope and kind != "default":
        yield f"its rope scaling {kind!r} is not mapped; only plain rope is"


def refuse_expansion(width: int, inner: int) -> Iterator[str]:
    if inner != 2 * width:
        yield f"llama.cpp loads it only with an inner size of twice {width}, but it is {inner}"


def refuse_expert_weights(config: Any) -> Iterator[str]:
    if not config.norm_topk_prob:
        yield "llama.cpp scales the weights of the chosen experts to a sum of one, but this model does not"
