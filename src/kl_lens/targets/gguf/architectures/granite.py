"""Granite 4 (granitemoehybrid) and Bamba: llama.cpp's `granitehybrid`; without state-space layers, its `granite`."""

from __future__ import annotations

from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Module,
    Reasons,
    Rules,
    as_is,
)

_ATTENTION = ("attention", "full_attention")  # transformers renamed it in version 5


def _attention_layers(config: Any) -> list[bool]:
    kinds = (
        config.layers_block_type if config.model_type == "bamba" else config.layer_types
    )
    return [kind in _ATTENTION for kind in kinds]


def _rotary(config: Any) -> int:
    """How many dimensions of a head rotate; 0 without rope."""
    if (
        config.model_type == "granitemoehybrid"
        and config.position_embedding_type != "rope"
    ):
        return 0
    return parts.rotary(config)


def _experts(config: Any) -> int:
    return int(getattr(config, "num_local_experts", 0) or 0)


def _name(config: Any) -> str:
    return "granite" if all(_attention_layers(config)) else "granitehybrid"


def _metadata(config: Any) -> Metadata:
    values: Metadata = {
        **parts.hybrid_metadata(parts.inner_size(config), "mamba_n_heads"),
        "attention.head_count_kv": [
            config.num_key_value_heads if attention else 0
            for attention in _attention_layers(config)
        ],
        # llama.cpp uses this flag as a switch for rope in this architecture.
        "rope.scaling.finetuned": _rotary(config) > 0,
        **({"rope.dimension_count": _rotary(config)} if _rotary(config) else {}),
        "rope.freq_base": parts.rope_base(config),
        "ssm.group_count": "mamba_n_groups",
    }
    if config.model_type == "granitemoehybrid":
        values |= parts.granite_scales(config)
        if not _experts(config):
            values["feed_forward_length"] = config.shared_intermediate_size
    if _experts(config):
        values |= {
            "expert_count": _experts(config),
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        }
    return values


def _layer(config: Any, layer: Module) -> Rules:
    bamba = config.model_type == "bamba"
    second_norm = "pre_ff_layernorm" if bamba else "post_attention_layernorm"
    rules = layer.weights({"attn_norm": "input_layernorm", "ffn_norm": second_norm})
    if not _attention_layers(config)[layer.index]:
        rules += parts.mamba2_layer(layer.inside("mamba"), config.mamba_n_groups)
    else:
        heads = (config.num_attention_heads, config.num_key_value_heads)
        rotary = _rotary(config)
        orders = [
            parts.interleaved_heads(count, rotary) if rotary else as_is for count in heads
        ]
        rules += parts.attention_layer(layer.inside("self_attn"), *orders)
    if bamba:
        return rules + parts.gated_mlp(layer.inside("feed_forward"))
    suffix = "_shexp" if _experts(config) else ""
    shared = layer.inside("shared_mlp")
    rules += [
        *shared.weights({f"ffn_gate{suffix}": "input_linear"}, parts.half(0)),
        *shared.weights({f"ffn_up{suffix}": "input_linear"}, parts.half(1)),
        *shared.weights({f"ffn_down{suffix}": "output_linear"}),
    ]
    if _experts(config):
        rules += parts.gated_experts(layer.inside("block_sparse_moe"), "router")
    return rules


def _refusals(config: Any) -> Reasons:
    if _name(config) == "granitehybrid":
        yield from parts.refuse_expansion(config.hidden_size, parts.inner_size(config))
    elif _experts(config):
        yield "it has only attention layers, and experts: llama.cpp's granite is dense"
    biases = ("attention_bias", "mlp_bias", "mamba_proj_bias")
    yield from parts.refusals(
        config, *biases, scalings=("default",) if _rotary(config) else ()
    )


_NAMES = dict.fromkeys(("granitemoehybrid", "bamba"), _name)
ARCHITECTURE = Architecture(_NAMES, _metadata, _layer, _refusals)
