"""Pieces that several architectures share: state-space layers, attention, experts, and their transforms."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kl_lens.targets.gguf.architectures.base import (
    Metadata,
    Module,
    Reasons,
    Rules,
    TensorRule,
    Transform,
    as_is,
)
from kl_lens.weights.formats.gguf_blocks import gguf_module

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


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """For norms that are stored minus one."""
    return tensor.float() + 1


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
        rows = tensor.unflatten(0, (heads, -1))
        pairs = rows[:, :rotary].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pairs, rows[:, rotary:]], dim=1).flatten(0, 1)

    return reorder


# -- metadata --------------------------------------------------------------------------------------------


def head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )


def sizes(feed_forward: int | str) -> Metadata:
    return {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": feed_forward,
        "block_count": "num_hidden_layers",
    }


def hybrid_metadata(inner: int, rank: int | str) -> Metadata:
    """Metadata of every hybrid of attention and state-space layers; `rank`: of the time steps, or the heads."""
    return {
        **sizes("intermediate_size"),
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.inner_size": inner,
        "ssm.state_size": "mamba_d_state",
        "ssm.time_step_rank": rank,
    }


def inner_size(config: Any) -> int:
    return int(config.mamba_expand * config.hidden_size)


def granite_scales(config: Any) -> Metadata:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def rope_base(config: Any) -> float:
    return float(rope_of(config).get("rope_theta", 10000.0))


def rotary(config: Any) -> int:
    """How many dimensions of a head rotate."""
    return int(head_size(config) * rope_of(config).get("partial_rotary_factor", 1.0))


def rope_of(config: Any) -> dict[str, Any]:
    """The settings of rope; in full attention, where there are two kinds."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def original_context(config: Any) -> int:
    """The tokens of a text that scaled rope was trained on."""
    original = rope_of(config).get("original_max_position_embeddings")
    return int(original or config.max_position_embeddings)


def plain_frequencies(config: Any) -> torch.Tensor:
    """Of rope that is not scaled."""
    size = rotary(config)
    return rope_base(config) ** -(torch.arange(0, size, 2).float() / size)


def rope_metadata(config: Any) -> Metadata:
    """Base and scaling; the factors of `llama3` and `longrope` are tensors."""
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    values: Metadata = {
        "rope.dimension_count": rotary(config),
        "rope.freq_base": rope_base(config),
    }
    if kind in ("linear", "yarn", "longrope"):
        values["rope.scaling.type"] = gguf_module().RopeScalingType(kind)
    if kind in ("linear", "yarn"):
        values["rope.scaling.factor"] = float(rope["factor"])
    if kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = original_context(config)
    if kind == "longrope":
        _, values["rope.scaling.attn_factor"] = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return values


# -- groups of tensors -----------------------------------------------------------------------------------


def convolution(mixer: Module) -> Rules:
    taps = mixer.tensor("ssm_conv1d.weight", "conv1d.weight", squeezed_convolution)
    bias = mixer.tensor("ssm_conv1d.bias", "conv1d.bias")
    if bias.parameter not in mixer.shapes:  # llama.cpp always adds one
        channels = mixer.shapes.get(taps.parameter or "", (0,))[:1]
        bias = TensorRule(bias.name, None, constant=(0.0,) * math.prod(channels))
    return [taps, bias]


def mamba1_layer(mixer: Module) -> Rules:
    return [
        *mixer.weights({"ssm_in": "in_proj"}),
        *convolution(mixer),
        *mixer.weights({"ssm_x": "x_proj", "ssm_dt": "dt_proj"}),
        mixer.tensor("ssm_dt.bias", "dt_proj.bias"),
        mixer.tensor("ssm_a", "A_log", negative_exponential),
        mixer.tensor("ssm_d", "D"),
        *mixer.weights({"ssm_out": "out_proj"}),
    ]


def mamba2_layer(mixer: Module, groups: int, *, norm: bool = True) -> Rules:
    return [
        *mixer.weights({"ssm_in": "in_proj"}),
        *convolution(mixer),
        mixer.tensor("ssm_dt.bias", "dt_bias"),
        mixer.tensor("ssm_a", "A_log", negative_exponential_column),
        mixer.tensor("ssm_d", "D", column),
        *mixer.weights({"ssm_out": "out_proj"}),
        *(mixer.weights({"ssm_norm": "norm"}, in_groups(groups)) if norm else ()),
    ]


def attention_layer(
    attention: Module, query: Transform = as_is, key: Transform = as_is
) -> Rules:
    return [
        *attention.weights({"attn_q": "q_proj"}, query),
        *attention.weights({"attn_k": "k_proj"}, key),
        *attention.weights({"attn_v": "v_proj", "attn_output": "o_proj"}),
    ]


def gated_mlp(mlp: Module, suffix: str = "") -> Rules:
    return mlp.weights(
        {f"ffn_{part}{suffix}": f"{part}_proj" for part in ("gate", "up", "down")}
    )


def gated_experts(mlp: Module, router: str = "gate") -> Rules:
    """A router and experts whose gate and up matrices are one parameter."""
    return [
        *mlp.weights({"ffn_gate_inp": router}),
        mlp.tensor("ffn_gate_exps.weight", "experts.gate_up_proj", half(0)),
        mlp.tensor("ffn_up_exps.weight", "experts.gate_up_proj", half(1)),
        mlp.tensor("ffn_down_exps.weight", "experts.down_proj"),
    ]


# -- reasons to refuse -----------------------------------------------------------------------------------


# Settings of yarn that llama.cpp reads otherwise than transformers, or not at all.
_OF_YARN = (
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "beta_fast",
    "beta_slow",
)


def refusals(
    config: Any,
    *biases: str,
    activation: str = "silu",
    scalings: tuple[str, ...] = ("default",),
    steps: bool = True,
) -> Reasons:
    """Biases, activations, limits of time steps and rope scaling that llama.cpp does not compute; no `scalings`: it has
    no rope."""
    for name in biases:
        if getattr(config, name, False):
            yield f"it has biases ({name}), for which llama.cpp has no tensors"
    silu = ("silu", "swish")
    expected = silu if activation in silu else (activation,)
    for name, computed in {
        "hidden_act": expected,
        "hidden_activation": expected,
        "activation_function": expected,
        "mamba_hidden_act": silu,
        "mlp_hidden_act": ("relu2",),
    }.items():
        if (actual := getattr(config, name, computed[0])) not in computed:
            yield f"its activation {actual!r} is not llama.cpp's {computed[0]!r}"
    limits = tuple(getattr(config, "time_step_limit", None) or (0.0, math.inf))
    if steps and limits != (0.0, math.inf):
        yield f"it limits time steps to {limits}, but llama.cpp does not limit them"
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    if scalings and kind not in scalings:
        yield f"its rope scaling {kind!r} is not mapped; only {', '.join(scalings)} rope is"
    if kind == "yarn" and any(rope.get(name) is not None for name in _OF_YARN):
        yield "its yarn has settings of its own, which llama.cpp does not read"


def refuse_expansion(width: int, inner: int) -> Reasons:
    if inner != 2 * width:
        yield f"llama.cpp loads it only with an inner size of twice {width}, but it is {inner}"


def refuse_expert_weights(config: Any) -> Reasons:
    if not config.norm_topk_prob:
        yield "llama.cpp scales the weights of the chosen experts to a sum of one, but this model does not"
