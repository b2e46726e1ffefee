"""Granite 4 (granitemoehybrid) and Bamba: both are llama.cpp's `granitehybrid`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Shapes,
    TensorRule,
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
    return int(
        parts.head_size(config)
        * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    )


def _inner(config: Any) -> int:
    return int(config.mamba_expand * config.hidden_size)


def _experts(config: Any) -> int:
    return int(getattr(config, "num_local_experts", 0) or 0)


def _metadata(config: Any) -> Metadata:
    values: Metadata = {
        **parts.hybrid_metadata(config, _inner(config), config.mamba_n_heads),
        "attention.head_count_kv": [
            config.num_key_value_heads if attention else 0
            for attention in _attention_layers(config)
        ],
        # llama.cpp uses this flag as a switch for rope in this architecture.
        "rope.scaling.finetuned": _rotary(config) > 0,
        **({"rope.dimension_count": _rotary(config)} if _rotary(config) else {}),
        "rope.freq_base": parts.rope_base(config),
        "ssm.group_count": config.mamba_n_groups,
    }
    if config.model_type == "granitemoehybrid":
        values |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
        if not _experts(config):
            values["feed_forward_length"] = config.shared_intermediate_size
    if _experts(config):
        values |= {
            "expert_count": _experts(config),
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
        }
    return values


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    bamba = config.model_type == "bamba"
    norm = "model.final_layernorm.weight" if bamba else "model.norm.weight"
    second_norm = "pre_ff_layernorm" if bamba else "post_attention_layernorm"
    rules = parts.ends("model.embed_tokens.weight", norm, "lm_head.weight", shapes)
    rotary = _rotary(config)
    query = (
        parts.interleaved_heads(config.num_attention_heads, rotary) if rotary else as_is
    )
    key = parts.interleaved_heads(config.num_key_value_heads, rotary) if rotary else as_is
    for index, attention in enumerate(_attention_layers(config)):
        block = f"blk.{index}"
        layer = f"model.layers.{index}"
        rules += parts.norms(
            block, layer, {"attn_norm": "input_layernorm", "ffn_norm": second_norm}
        )
        if attention:
            rules += parts.attention_layer(
                block, f"{layer}.self_attn", query=query, key=key
            )
        else:
            rules += parts.mamba2_layer(
                block, f"{layer}.mamba", config.mamba_n_groups, shapes
            )
        if bamba:
            rules += parts.gated_mlp(block, f"{layer}.feed_forward")
        else:
            rules += _granite_mlp(config, block, layer)
    return rules


def _granite_mlp(config: Any, block: str, layer: str) -> list[TensorRule]:
    suffix = "_shexp" if _experts(config) else ""
    shared = f"{layer}.shared_mlp"
    rules = [
        TensorRule(
            f"{block}.ffn_gate{suffix}.weight",
            f"{shared}.input_linear.weight",
            parts.half(0),
        ),
        TensorRule(
            f"{block}.ffn_up{suffix}.weight",
            f"{shared}.input_linear.weight",
            parts.half(1),
        ),
        TensorRule(f"{block}.ffn_down{suffix}.weight", f"{shared}.output_linear.weight"),
    ]
    if _experts(config):
        moe = f"{layer}.block_sparse_moe"
        rules += parts.gated_experts(block, f"{moe}.router.weight", f"{moe}.experts")
    return rules


def _refusals(config: Any) -> Iterable[str]:
    if all(_attention_layers(config)):
        yield "it has only attention layers, but this architecture of llama.cpp is for hybrids"
    yield from parts.refuse_expansion(config.hidden_size, _inner(config))
    biases = ("attention_bias", "mlp_bias", "mamba_proj_bias")
    yield from parts.refusals(config, *biases, rope=_rotary(config) > 0)


_NAMES = dict.fromkeys(("granitemoehybrid", "bamba"), "granitehybrid")
ARCHITECTURE = Architecture(_NAMES, _metadata, _tensors, _refusals)
