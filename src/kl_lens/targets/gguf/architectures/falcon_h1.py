"""Falcon-H1: llama.cpp's `falcon-h1`. Attention and Mamba-2 side by side in every layer.

llama.cpp does not apply the model's constant factors, so they go into the weights. A factor on a whole matrix
changes the scales of its blocks, not its integers (up to a tie in rounding). The head's factor goes into the
final norm instead, so that the head keeps its integers and a tied head stays one tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    HEAD,
    Architecture,
    Factors,
    Metadata,
    Module,
    Reasons,
    Rules,
    Shapes,
)


def _inner(config: Any) -> int:
    return int(config.mamba_d_ssm or config.mamba_expand * config.hidden_size)


def _metadata(config: Any) -> Metadata:
    return {
        **parts.hybrid_metadata(_inner(config), "mamba_n_heads"),
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": parts.head_size(config),
        "attention.value_length": parts.head_size(config),
        "rope.freq_base": parts.rope_base(config),
        "rope.dimension_count": parts.head_size(config),
        "ssm.group_count": "mamba_n_groups",
    }


def _factors(config: Any, shapes: Shapes) -> dict[str, Factors]:
    inner = _inner(config)
    states = config.mamba_n_groups * config.mamba_d_state
    # Rows of the input projection are z, x, B, C and the time steps, each with its own factor.
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    projection = torch.tensor(
        [m * config.ssm_in_multiplier for m in config.ssm_multipliers]
    )
    attention = config.attention_in_multiplier
    gate, down = config.mlp_multipliers
    # A tied head is multiplied like the embedding.
    tied = 1.0 if HEAD in shapes else config.embedding_multiplier
    return {
        "token_embd.weight": config.embedding_multiplier,
        "output_norm.weight": config.lm_head_multiplier / tied,
        "ssm_in.weight": projection.repeat_interleave(sizes)[:, None],
        "ssm_out.weight": config.ssm_out_multiplier,
        "attn_q.weight": attention,
        "attn_k.weight": attention * config.key_multiplier,
        "attn_v.weight": attention,
        "attn_output.weight": config.attention_out_multiplier,
        "ffn_gate.weight": gate,
        "ffn_down.weight": down,
    }


def _layer(config: Any, layer: Module) -> Rules:
    return [
        *layer.weights({"attn_norm": "input_layernorm"}),
        # Without ".weight" only in this architecture.
        layer.tensor("ffn_norm", "pre_ff_layernorm.weight"),
        *parts.mamba2_layer(
            layer.inside("mamba"), config.mamba_n_groups, norm=config.mamba_rms_norm
        ),
        *parts.attention_layer(layer.inside("self_attn")),
        *parts.gated_mlp(layer.inside("feed_forward")),
    ]


def _refusals(config: Any) -> Reasons:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        yield "it normalises before the gate (mamba_norm_before_gate), but llama.cpp gates first"
    yield from parts.refusals(
        config, "attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"
    )


ARCHITECTURE = Architecture(
    {"falcon_h1": "falcon-h1"}, _metadata, _layer, _refusals, factors=_factors
)
