"""Jamba, with and without experts: llama.cpp's `jamba`. Attention without rope, Mamba-1 layers with norms."""

from __future__ import annotations

from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Module,
    Reasons,
    Rules,
)


def _is_attention(config: Any, index: int) -> bool:
    return bool(index % config.attn_layer_period == config.attn_layer_offset)


def _has_experts(config: Any, index: int) -> bool:
    return (
        config.num_experts > 1
        and index % config.expert_layer_period == config.expert_layer_offset
    )


def _metadata(config: Any) -> Metadata:
    layers = range(config.num_hidden_layers)
    with_experts = any(_has_experts(config, index) for index in layers)
    return {
        **parts.hybrid_metadata(parts.inner_size(config), "mamba_dt_rank"),
        "attention.head_count_kv": [
            config.num_key_value_heads * _is_attention(config, i) for i in layers
        ],
        "expert_count": config.num_experts if with_experts else 0,
        "expert_used_count": config.num_experts_per_tok if with_experts else 0,
    }


def _layer(config: Any, layer: Module) -> Rules:
    rules = layer.weights(
        {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    )
    if _is_attention(config, layer.index):
        rules += parts.attention_layer(layer.inside("self_attn"))
    else:
        mixer = layer.inside("mamba")
        norms = {f"ssm_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
        rules += [*parts.mamba1_layer(mixer), *mixer.weights(norms)]
    mlp = layer.inside("feed_forward")
    if _has_experts(config, layer.index):
        return rules + parts.gated_experts(mlp, "router")
    return rules + parts.gated_mlp(mlp)


def _refusals(config: Any) -> Reasons:
    yield from parts.refuse_expansion(config.hidden_size, parts.inner_size(config))
    yield from parts.refusals(config, "mamba_proj_bias", scalings=())


ARCHITECTURE = Architecture({"jamba": "jamba"}, _metadata, _layer, _refusals)
