"""Qwen3-Next and Qwen3.5, dense and with experts: llama.cpp's `qwen3next`, `qwen35` and `qwen35moe`.

Most layers are gated delta rules. At regular intervals there is gated attention, with rope on part of each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Module,
    Reasons,
    Rules,
    Transform,
    as_is,
)


def _interval(config: Any) -> int:
    """Attention comes every so many layers; 0: not regularly."""
    full = [
        index for index, kind in enumerate(config.layer_types) if kind == "full_attention"
    ]
    interval = full[0] + 1 if full else 0
    regular = interval and full == list(
        range(interval - 1, config.num_hidden_layers, interval)
    )
    return interval if regular else 0


def _has_experts(config: Any) -> bool:
    return str(config.model_type) != "qwen3_5_text"


def _heads(config: Any) -> tuple[int, int]:
    """Key heads, and value heads per key head."""
    keys = int(config.linear_num_key_heads)
    return keys, int(config.linear_num_value_heads) // keys


def _metadata(config: Any) -> Metadata:
    values: Metadata = {
        **parts.sizes(
            getattr(config, "intermediate_size", 0) or config.moe_intermediate_size,
        ),
        "full_attention_interval": _interval(config),
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": parts.rope_base(config),
        "rope.dimension_count": parts.rotary(config),
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "ssm.state_size": "linear_key_head_dim",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.group_count": "linear_num_key_heads",
    }
    if config.model_type != "qwen3_next":
        # Three kinds of positions alternate; in text all three are equal.
        pairs = parts.rotary(config) // 2
        values["rope.dimension_sections"] = [
            (pairs + 2) // 3,
            (pairs + 1) // 3,
            pairs // 3,
            0,
        ]
    if _has_experts(config):
        values |= {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        }
    return values


def _projected(config: Any, *wanted: str) -> Transform:
    """Rows of Qwen3-Next's `in_proj_qkvz`, which groups q, k, v and z by key head; llama.cpp separates them."""
    keys, per_key = _heads(config)
    sizes = [config.linear_key_head_dim] * 2 + [
        per_key * config.linear_value_head_dim
    ] * 2

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        pieces = dict(
            zip("qkvz", tensor.unflatten(0, (keys, -1)).split(sizes, dim=1), strict=True)
        )
        return torch.cat([pieces[part].flatten(0, 1) for part in wanted])

    return transform


def _value_heads(config: Any, *, behind: int = 0) -> Transform:
    """Value heads in the order of Qwen3.5's file: the first of every key head, then the second of every one, and so on.

    `behind`: rows before them (queries and keys) that stay in place."""
    keys, per_key = _heads(config)

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        values = (
            tensor[behind:]
            .unflatten(0, (keys, per_key, -1))
            .transpose(0, 1)
            .flatten(0, 2)
        )
        return torch.cat([tensor[:behind], values])

    return transform if per_key > 1 else as_is


def _delta_layer(config: Any, mixer: Module) -> Rules:
    channels: Transform = as_is
    heads: Transform = as_is
    columns = (1, 1)
    if config.model_type == "qwen3_next":
        parameter = "in_proj_qkvz.weight"
        rules = [
            mixer.tensor("attn_qkv.weight", parameter, _projected(config, "q", "k", "v")),
            mixer.tensor("attn_gate.weight", parameter, _projected(config, "z")),
            *mixer.weights({"ssm_ba": "in_proj_ba"}),
        ]
    else:
        queries_and_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        channels = _value_heads(config, behind=queries_and_keys)
        heads = _value_heads(config)
        columns = _heads(config) if _heads(config)[1] > 1 else (1, 1)
        names = {
            "attn_gate": "in_proj_z",
            "ssm_beta": "in_proj_b",
            "ssm_alpha": "in_proj_a",
        }
        rules = mixer.weights({"attn_qkv": "in_proj_qkv"}, channels)
        rules += mixer.weights(names, heads)
    output = mixer.tensor("ssm_out.weight", "out_proj.weight")
    return [
        *rules,
        *mixer.weights(
            {"ssm_conv1d": "conv1d"}, lambda t: channels(parts.squeezed_convolution(t))
        ),
        mixer.tensor("ssm_a", "A_log", lambda t: heads(parts.negative_exponential(t))),
        mixer.tensor("ssm_dt.bias", "dt_bias", heads),
        *mixer.weights({"ssm_norm": "norm"}),
        replace(output, columns=columns),
    ]


def _experts(mlp: Module) -> Rules:
    return [
        *parts.gated_experts(mlp),
        *parts.gated_mlp(mlp.inside("shared_expert"), "_shexp"),
        *mlp.weights({"ffn_gate_inp_shexp": "shared_expert_gate"}, torch.flatten),
    ]


def _layer(config: Any, layer: Module, kind: str = "") -> Rules:
    norms = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    }
    if (kind or config.layer_types[layer.index]) == "full_attention":
        norms |= {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
        rules = parts.attention_layer(layer.inside("self_attn"))
    else:
        rules = _delta_layer(config, layer.inside("linear_attn"))
    mlp = layer.inside("mlp")
    rules += layer.weights(norms, parts.plus_one)
    return rules + (_experts(mlp) if _has_experts(config) else parts.gated_mlp(mlp))


def _further(config: Any) -> Rules:
    """The head for the token after the next one: a block with attention behind all others."""
    head = Module(f"blk.{config.num_hidden_layers}", "mtp", {})
    norms = {
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
    }
    return [
        *_layer(config, head.inside("layers.0"), "full_attention"),
        *head.weights({"nextn.eh_proj": "fc"}),
        *head.weights(norms, parts.plus_one),
    ]


def _refusals(config: Any) -> Reasons:
    if not _interval(config):
        yield "llama.cpp expects attention at a regular interval of layers, but this model has it elsewhere"
    if config.linear_key_head_dim != config.linear_value_head_dim:
        yield "llama.cpp expects keys and values of linear attention to have the same size"
    if config.model_type == "qwen3_next":
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            yield "llama.cpp's qwen3next has experts in every layer, but this model does not"
        yield from parts.refuse_expert_weights(config)
    yield from parts.refusals(config, "attention_bias")


def _notes(config: Any) -> Reasons:
    if config.model_type != "qwen3_next" and _heads(config)[1] > 1:
        yield (
            "llama.cpp has the heads of linear_attn.out_proj in another order: a format with blocks longer than a head "
            f"({config.linear_value_head_dim} columns) is replaced there by one with shorter blocks"
        )


_NAMES = {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
ARCHITECTURE = Architecture(
    _NAMES, _metadata, _layer, _refusals, _notes, _further, last_norm=parts.plus_one
)
