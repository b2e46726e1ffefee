"""Jamba, with and without experts: llama.cpp's `jamba`. Attention without rope, Mamba-1 layers with norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Shapes,
    TensorRule,
)


def _is_attention(config: Any, index: int) -> bool:
    return bool(index % config.attn_layer_period == config.attn_layer_offset)


def _has_experts(config: Any, index: int) -> bool:
    return (
        config.num_experts > 1
        and index % config.expert_layer_period == config.expert_layer_offset
    )


def _inner(config: Any) -> int:
    return int(config.mamba_expand * config.hidden_size)


def _metadata(config: Any) -> Metadata:
    layers = range(config.num_hidden_layers)
    with_experts = any(_has_experts(config, index) for index in layers)
    return {
        **parts.hybrid_metadata(config, _inner(config), int(config.mamba_dt_rank)),
        "attention.head_count_kv": [
            config.num_key_value_heads * _is_attention(config, i) for i in layers
        ],
        "expert_count": config.num_experts if with_experts else 0,
        "expert_used_count": config.num_experts_per_tok if with_experts else 0,
    }


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    rules = parts.ends(
        "model.embed_tokens.weight",
        "model.final_layernorm.weight",
        "lm_head.weight",
        shapes,
    )
    for index in range(config.num_hidden_layers):
        block = f"blk.{index}"
        layer = f"model.layers.{index}"
        rules += parts.norms(
            block, layer, {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
        )
        if _is_attention(config, index):
            rules += parts.attention_layer(block, f"{layer}.self_attn")
        else:
            rules += parts.mamba1_layer(block, f"{layer}.mamba", shapes)
            names = {
                f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")
            }
            rules += parts.norms(block, layer, names)
        mlp = f"{layer}.feed_forward"
        if _has_experts(config, index):
            rules += parts.gated_experts(block, f"{mlp}.router.weight", f"{mlp}.experts")
        else:
            rules += parts.gated_mlp(block, mlp)
    return rules


def _refusals(config: Any) -> Iterable[str]:
    yield from parts.refuse_expansion(config.hidden_size, _inner(config))
    yield from parts.refusals(config, "mamba_proj_bias", rope=False)


ARCHITECTURE = Architecture({"jamba": "jamba"}, _metadata, _tensors, _refusals)
