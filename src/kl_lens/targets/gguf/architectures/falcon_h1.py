"""Falcon-H1: llama.cpp's `falcon-h1`. Attention and Mamba-2 side by side in every layer.

llama.cpp does not apply the model's constant factors, so they go into the weights. A factor on a whole matrix
changes the scales of its blocks, not its integers (up to a tie in rounding). The head's factor goes into the
final norm instead, so that the head keeps its integers and a tied head stays one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Factors,
    Metadata,
    Shapes,
    TensorRule,
)

_HEAD = "lm_head.weight"


def _inner(config: Any) -> int:
    return int(config.mamba_d_ssm or config.mamba_expand * config.hidden_size)


def _metadata(config: Any) -> Metadata:
    return {
        **parts.hybrid_metadata(config, _inner(config), config.mamba_n_heads),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": parts.head_size(config),
        "attention.value_length": parts.head_size(config),
        "rope.freq_base": parts.rope_base(config),
        "rope.dimension_count": parts.head_size(config),
        "ssm.group_count": config.mamba_n_groups,
    }


def _factors(config: Any, tied: bool) -> dict[str, Factors]:
    """Tensor → the multiplier that transformers applies and llama.cpp does not."""
    inner = _inner(config)
    states = config.mamba_n_groups * config.mamba_d_state
    # Rows of the input projection are z, x, B, C and the time steps, each with its own factor.
    sizes = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    projection = torch.tensor(
        [m * config.ssm_in_multiplier for m in config.ssm_multipliers]
    )
    attention = config.attention_in_multiplier
    (gate, down) = config.mlp_multipliers
    head = config.lm_head_multiplier / (config.embedding_multiplier if tied else 1.0)
    return {
        "token_embd.weight": config.embedding_multiplier,
        "output_norm.weight": head,
        "ssm_in.weight": projection.repeat_interleave(sizes)[:, None],
        "ssm_out.weight": config.ssm_out_multiplier,
        "attn_q.weight": attention,
        "attn_k.weight": attention * config.key_multiplier,
        "attn_v.weight": attention,
        "attn_output.weight": config.attention_out_multiplier,
        "ffn_gate.weight": gate,
        "ffn_down.weight": down,
    }


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    rules = parts.ends(
        "model.embed_tokens.weight", "model.final_layernorm.weight", _HEAD, shapes
    )
    for index in range(config.num_hidden_layers):
        block = f"blk.{index}"
        layer = f"model.layers.{index}"
        rules += [
            TensorRule(
                f"{block}.attn_norm.weight",
                f"{layer}.input_layernorm.weight",
                float32=True,
            ),
            # Without ".weight" only in this architecture.
            TensorRule(
                f"{block}.ffn_norm", f"{layer}.pre_ff_layernorm.weight", float32=True
            ),
        ]
        rules += parts.mamba2_layer(
            block,
            f"{layer}.mamba",
            config.mamba_n_groups,
            shapes,
            norm=config.mamba_rms_norm,
        )
        rules += parts.attention_layer(block, f"{layer}.self_attn")
        rules += parts.gated_mlp(block, f"{layer}.feed_forward")
    factors = _factors(config, tied=_HEAD not in shapes)
    return [
        replace(rule, factors=factors.get(re.sub(r"^blk\.\d+\.", "", rule.name), 1.0))
        for rule in rules
    ]


def _refusals(config: Any) -> Iterable[str]:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        yield "it normalises before the gate (mamba_norm_before_gate), but llama.cpp gates first"
    yield from parts.refusals(
        config, "attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"
    )


ARCHITECTURE = Architecture({"falcon_h1": "falcon-h1"}, _metadata, _tensors, _refusals)
