"""Nemotron-H: llama.cpp's `nemotron_h`, and `nemotron_h_moe` where the feed-forward layers have experts.

Every layer does one thing: Mamba-2, attention without rope, a plain MLP with squared ReLU, or experts.
"""

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

_KINDS = {
    "linear_attention": "mamba",
    "full_attention": "attention",
}  # transformers' names since version 5


def _layers(config: Any) -> list[str]:
    return [_KINDS.get(kind, kind) for kind in config.layers_block_type]


def _has_experts(config: Any) -> bool:
    return "moe" in _layers(config)


def _metadata(config: Any) -> Metadata:
    layers = _layers(config)
    width = (
        config.moe_intermediate_size if _has_experts(config) else config.intermediate_size
    )
    values: Metadata = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": len(layers),
        "feed_forward_length": [
            width if kind in ("mlp", "moe") else 0 for kind in layers
        ],
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "attention" else 0 for kind in layers
        ],
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        # Releases of llama.cpp differ in which of the two they read.
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
        "ssm.group_count": "n_groups",
    }
    if _has_experts(config):
        values |= {
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": bool(config.norm_topk_prob),
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": 1,
        }
    return values


def _layer(config: Any, layer: Module) -> Rules:
    kind = _layers(config)[layer.index]
    mixer = layer.inside("mixer")
    rules = layer.weights({"attn_norm": "norm"})
    up_and_down = {"ffn_up": "up_proj", "ffn_down": "down_proj"}
    if kind == "mamba":
        return rules + parts.mamba2_layer(mixer, config.n_groups)
    if kind == "attention":
        return rules + parts.attention_layer(mixer)
    if kind == "mlp":
        return rules + mixer.weights(up_and_down)
    shared = {f"{name}_shexp": parameter for name, parameter in up_and_down.items()}
    return [
        *rules,
        *mixer.weights({"ffn_gate_inp": "gate"}),
        mixer.tensor("exp_probs_b.bias", "gate.e_score_correction_bias"),
        mixer.tensor("ffn_up_exps.weight", "experts.up_proj"),
        mixer.tensor("ffn_down_exps.weight", "experts.down_proj"),
        *mixer.inside("shared_experts").weights(shared),
    ]


def _refusals(config: Any) -> Reasons:
    kinds = set(_layers(config))
    if {"mlp", "moe"} <= kinds:
        yield "it has plain MLP layers and expert layers, but llama.cpp supports only one kind per model"
    if "mamba" not in kinds or "attention" not in kinds:
        yield "llama.cpp's nemotron_h needs both Mamba-2 and attention layers"
    if "moe" in kinds and getattr(config, "moe_latent_size", None):
        yield "its experts work in a latent space (moe_latent_size), which is not mapped"
    if "moe" in kinds and config.n_group != 1:
        yield f"it routes within {config.n_group} groups of experts, but llama.cpp's nemotron_h uses one group"
    biases = ("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias")
    yield from parts.refusals(config, *biases, scalings=(), steps=False)


def _notes(config: Any) -> Reasons:
    if config.time_step_min:
        yield (
            f"transformers raises time steps below {config.time_step_min:g} to that value, llama.cpp does not: "
            "layers that use such small steps differ a little"
        )


def _name(config: Any) -> str:
    return "nemotron_h_moe" if _has_experts(config) else "nemotron_h"


ARCHITECTURE = Architecture({"nemotron_h": _name}, _metadata, _layer, _refusals, _notes)
