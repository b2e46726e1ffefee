"""LFM2, dense and with experts: llama.cpp's `lfm2` and `lfm2moe`. Short convolutions, and attention."""

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


def _has_experts(config: Any, index: int) -> bool:
    return bool(config.model_type == "lfm2_moe" and index >= config.num_dense_layers)


def _feed_forward(config: Any) -> int:
    """The width that the model computes from the configured one."""
    width = int(config.intermediate_size)
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = config.block_multiple_of * -(-width // config.block_multiple_of)
    return width


def _metadata(config: Any) -> Metadata:
    values: Metadata = {
        **parts.sizes(_feed_forward(config)),
        "vocab_size": "vocab_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": [
            0 if kind == "conv" else config.num_key_value_heads
            for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "rope.freq_base": parts.rope_base(config),
        "shortconv.l_cache": "conv_L_cache",
    }
    if config.model_type == "lfm2_moe":
        values |= {
            "leading_dense_block_count": "num_dense_layers",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_gating_func": 2,  # a sigmoid
        }
    return values


def _layer(config: Any, layer: Module) -> Rules:
    rules = layer.weights({"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"})
    if config.layer_types[layer.index] == "conv":
        rules += layer.weights(
            {"shortconv.conv": "conv.conv"}, parts.squeezed_convolution
        )
        rules += layer.weights(
            {f"shortconv.{part}_proj": f"conv.{part}_proj" for part in ("in", "out")}
        )
    else:
        names = {f"attn_{part}": f"{part}_proj" for part in "qkv"}
        names |= {"attn_output": "out_proj"}
        names |= {f"attn_{part}_norm": f"{part}_layernorm" for part in "qk"}
        rules += layer.inside("self_attn").weights(names)
    mlp = layer.inside("feed_forward")
    if _has_experts(config, layer.index):
        bias = mlp.tensor("exp_probs_b.bias", "expert_bias")
        return [*rules, *parts.gated_experts(mlp), bias]
    return rules + mlp.weights({"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"})


def _refusals(config: Any) -> Reasons:
    yield from parts.refusals(config, "conv_bias")
    if config.model_type == "lfm2_moe":
        yield from parts.refuse_expert_weights(config)
        if config.routed_scaling_factor != 1:
            yield f"it scales its experts by {config.routed_scaling_factor}, but llama.cpp's lfm2moe does not"
        if not config.use_expert_bias:
            yield "it has no bias for its experts, but llama.cpp's lfm2moe requires one"


ARCHITECTURE = Architecture(
    {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}, _metadata, _layer, _refusals
)
