"""Mamba and Falcon-Mamba, llama.cpp's `mamba`; Mamba-2, its `mamba2`."""

from __future__ import annotations

from typing import Any

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    ENDLESS_CONTEXT,
    Architecture,
    Metadata,
    Module,
    Reasons,
    Rules,
)


def _metadata(config: Any) -> Metadata:
    if config.model_type == "mamba2":
        inner = config.num_heads * config.head_dim
        rank = "num_heads"  # llama.cpp has one name for both
        family: Metadata = {"ssm.group_count": "n_groups"}
    else:
        inner = config.intermediate_size
        rank = "time_step_rank"
        family = {"ssm.dt_b_c_rms": config.model_type == "falcon_mamba"}
    return {
        "context_length": ENDLESS_CONTEXT,
        "embedding_length": "hidden_size",
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": "num_hidden_layers",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": inner,
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": rank,
        **family,
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    }


def _layer(config: Any, layer: Module) -> Rules:
    mixer = layer.inside("mixer")
    rules = layer.weights({"attn_norm": "norm"})
    if config.model_type == "mamba2":
        return rules + parts.mamba2_layer(mixer, config.n_groups)
    return rules + parts.mamba1_layer(mixer)


def _refusals(config: Any) -> Reasons:
    if config.model_type != "mamba2":
        yield from parts.refuse_expansion(config.hidden_size, config.intermediate_size)
    yield from parts.refusals(config, "use_bias")


def _notes(config: Any) -> Reasons:
    if (
        config.model_type == "falcon_mamba"
        and config.mixer_rms_eps != config.layer_norm_epsilon
    ):
        yield (
            f"llama.cpp normalises B, C and the time step with epsilon {config.layer_norm_epsilon:g}, "
            f"transformers with {config.mixer_rms_eps:g}"
        )


_NAMES = {"mamba": "mamba", "mamba2": "mamba2", "falcon_mamba": "mamba"}
ARCHITECTURE = Architecture(_NAMES, _metadata, _layer, _refusals, _notes)
