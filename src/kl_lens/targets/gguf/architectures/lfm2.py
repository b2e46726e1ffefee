"""LFM2, dense and with experts: llama.cpp's `lfm2` and `lfm2moe`. Short convolutions, and attention."""

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
        **parts.sizes(config, _feed_forward(config)),
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [
            0 if kind == "conv" else config.num_key_value_heads
            for kind in config.layer_types
        ],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": parts.rope_base(config),
        "shortconv.l_cache": config.conv_L_cache,
    }
    if config.model_type == "lfm2_moe":
        values |= {
            "leading_dense_block_count": config.num_dense_layers,
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_gating_func": 2,  # a sigmoid
        }
    return values


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    rules = parts.ends(
        "model.embed_tokens.weight",
        "model.embedding_norm.weight",
        "lm_head.weight",
        shapes,
    )
    # Despite its name in llama.cpp, this is the final norm.
    rules[1] = TensorRule(
        "token_embd_norm.weight", "model.embedding_norm.weight", float32=True
    )
    for index, kind in enumerate(config.layer_types):
        block = f"blk.{index}"
        layer = f"model.layers.{index}"
        rules += parts.norms(
            block, layer, {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
        )
        if kind == "conv":
            short = f"{block}.shortconv"
            own = f"{layer}.conv"
            rules += parts.norms(short, own, {"conv": "conv"}, parts.squeezed_convolution)
            rules += parts.matrices(
                short, own, {"in_proj": "in_proj", "out_proj": "out_proj"}
            )
        else:
            names = {f"attn_{part}": f"{part}_proj" for part in "qkv"} | {
                "attn_output": "out_proj"
            }
            rules += parts.matrices(block, f"{layer}.self_attn", names)
            names = {f"attn_{part}_norm": f"{part}_layernorm" for part in "qk"}
            rules += parts.norms(block, f"{layer}.self_attn", names)
        mlp = f"{layer}.feed_forward"
        if _has_experts(config, index):
            rules += parts.gated_experts(block, f"{mlp}.gate.weight", f"{mlp}.experts")
            rules.append(
                TensorRule(
                    f"{block}.exp_probs_b.bias", f"{mlp}.expert_bias", float32=True
                )
            )
        else:
            rules += parts.matrices(
                block, mlp, {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
            )
    return rules


def _refusals(config: Any) -> Iterable[str]:
    yield from parts.refusals(config, "conv_bias")
    if config.model_type == "lfm2_moe":
        yield from parts.refuse_expert_weights(config)
        if config.routed_scaling_factor != 1:
            yield f"it scales its experts by {config.routed_scaling_factor}, but llama.cpp's lfm2moe does not"
        if not config.use_expert_bias:
            yield "it has no bias for its experts, but llama.cpp's lfm2moe requires one"


ARCHITECTURE = Architecture(
    {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}, _metadata, _tensors, _refusals
)
