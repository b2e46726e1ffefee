"""Qwen3.5, dense: llama.cpp's `qwen35`. Gated delta rule, and every so often gated attention with a part of rope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Shapes,
    TensorRule,
    as_is,
    register,
)


def _plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Its norms store what they are above one."""
    return tensor.float() + 1


def _interval(config: Any) -> int:
    """Every how many layers attention comes; 0: not regularly."""
    full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    interval = full[0] + 1 if full else 0
    regular = interval and full == list(range(interval - 1, config.num_hidden_layers, interval))
    return interval if regular else 0


def _rotary(config: Any) -> int:
    return int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


def _metadata(config: Any) -> Metadata:
    pairs = _rotary(config) // 2
    sections = [
        (pairs + 2) // 3,
        (pairs + 1) // 3,
        pairs // 3,
        0,
    ]  # in turn; of text all three are one position
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "full_attention_interval": _interval(config),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": parts.rope_base(config),
        "rope.dimension_count": _rotary(config),
        "rope.dimension_sections": sections,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.group_count": config.linear_num_key_heads,
    }


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    rules = parts.ends("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", shapes)
    rules[1] = TensorRule("output_norm.weight", "model.norm.weight", _plus_one, float32=True)
    for index, kind in enumerate(config.layer_types):
        block, layer = f"blk.{index}", f"model.layers.{index}"
        norms = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        if kind == "full_attention":
            norms |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
            rules += parts.attention_layer(block, f"{layer}.self_attn")
        else:
            mixer = f"{layer}.linear_attn"
            taps = f"{mixer}.conv1d.weight"
            matrices = {"attn_qkv": "qkv", "attn_gate": "z", "ssm_beta": "b", "ssm_alpha": "a"}
            rules += [
                TensorRule(f"{block}.{name}.weight", f"{mixer}.in_proj_{part}.weight")
                for name, part in matrices.items()
            ]
            rules += [
                TensorRule(f"{block}.ssm_conv1d.weight", taps, parts.squeezed_convolution, float32=True),
                TensorRule(f"{block}.ssm_a", f"{mixer}.A_log", parts.negative_exponential, float32=True),
                TensorRule(f"{block}.ssm_dt.bias", f"{mixer}.dt_bias", float32=True),
                TensorRule(f"{block}.ssm_norm.weight", f"{mixer}.norm.weight", as_is, float32=True),
                TensorRule(f"{block}.ssm_out.weight", f"{mixer}.out_proj.weight"),
            ]
        rules += [
            TensorRule(f"{block}.{name}.weight", f"{layer}.{norm}.weight", _plus_one, float32=True)
            for name, norm in norms.items()
        ]
        rules += parts.gated_mlp(block, f"{layer}.mlp")
    return rules


def _refusals(config: Any) -> Iterable[str | None]:
    if not _interval(config):
        yield "llama.cpp wants attention in every so many layers, and this model has it elsewhere"
    if config.linear_num_key_heads != config.linear_num_value_heads:
        yield (
            "with fewer key heads than value heads llama.cpp wants the columns of out_proj in another order, "
            "across the blocks in which they are quantized"
        )
    if config.linear_key_head_dim != config.linear_value_head_dim:
        yield "llama.cpp wants keys and values of its linear attention to be of one size"
    yield parts.refuse_bias(config, "attention_bias")
    yield parts.refuse_activation(config)
    yield parts.refuse_rope_scaling(config)


register(Architecture("qwen3_5_text", lambda _: "qwen35", _metadata, _tensors, _refusals))
