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
    second = config.model_type == "mamba2"
    falcon = config.model_type == "falcon_mamba"
    own: Metadata = (
        {"ssm.group_count": config.n_groups} if second else {"ssm.dt_b_c_rms": falcon}
    )
    return {
        "context_length": ENDLESS_CONTEXT,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_hidden_layers,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim
        if second
        else config.intermediate_size,
        "ssm.state_size": config.state_size,
        # also llama.cpp's name for the number of heads
        "ssm.time_step_rank": config.num_heads if second else int(config.time_step_rank),
        **own,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
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
