"""Mamba-2: llama.cpp's `mamba2`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    ENDLESS_CONTEXT,
    Architecture,
    Metadata,
    Shapes,
    TensorRule,
    register,
)


def _metadata(config: Any) -> Metadata:
    return {
        "context_length": ENDLESS_CONTEXT,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_hidden_layers,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,  # llama.cpp's name for the number of heads
        "ssm.group_count": config.n_groups,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }


def _tensors(config: Any, shapes: Shapes) -> list[TensorRule]:
    rules = parts.ends("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight", shapes)
    for index in range(config.num_hidden_layers):
        block, layer = f"blk.{index}", f"backbone.layers.{index}"
        rules.append(TensorRule(f"{block}.attn_norm.weight", f"{layer}.norm.weight", float32=True))
        rules += parts.mamba2_layer(block, f"{layer}.mixer", config.n_groups, shapes)
    return rules


def _refusals(config: Any) -> Iterable[str | None]:
    yield parts.refuse_norm_groups(config.n_groups)
    yield parts.refuse_bias(config, "use_bias")
    yield parts.refuse_activation(config)
    yield parts.refuse_time_limits(config)


register(Architecture("mamba2", lambda _: "mamba2", _metadata, _tensors, _refusals))
