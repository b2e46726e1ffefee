"""Kimi Linear and Ling 3.0 (`bailing_hybrid`): llama.cpp's `kimi-linear` and `bailingmoe3`.

Most layers are delta rules with a decay per channel. The others have latent attention, in Ling with rope and a gate.
"""

from __future__ import annotations

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
)

# Of the norms of keys, queries and the latent: a constant of the model's code.
_EPSILON = 1e-6


def _dense_layers(config: Any) -> int:
    return int(config.mlp_layer_types.count("dense"))


def _is_ling(config: Any) -> bool:
    return bool(config.model_type == "bailing_hybrid")


def _metadata(config: Any) -> Metadata:
    return {
        **parts.sizes("intermediate_size"),
        "attention.head_count": "num_attention_heads",
        # llama.cpp caches the latent, which all heads share, so there is one key head.
        "attention.head_count_kv": [
            int(kind == "full_attention") for kind in config.layer_types
        ],
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": "kv_lora_rank",
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": "v_head_dim",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.dimension_count": "qk_rope_head_dim",  # the part of a key that all heads share
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
        "leading_dense_block_count": _dense_layers(config),
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_gating_func": 2,  # a sigmoid
        **(_ling_metadata(config) if _is_ling(config) else {}),
    }


def _ling_metadata(config: Any) -> Metadata:
    return {
        "kda.safe_gate": True,
        "kda.gate_lower_bound": float(config.kda_lower_bound),
        "rope.freq_base": parts.rope_base(config),
    }


def _third(index: int) -> Transform:
    """Taps of the convolution for queries, keys or values; transformers stores all three as one."""
    return lambda tensor: tensor.chunk(3)[index]


def _of_latent(config: Any, *, keys: bool) -> Transform:
    """From `kv_b_proj`, per head: the map from latent to values, or the transposed map from latent to keys."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]

    def transform(tensor: torch.Tensor) -> torch.Tensor:
        key, value = tensor.unflatten(0, (config.num_attention_heads, -1)).split(
            sizes, dim=1
        )
        return key.transpose(1, 2) if keys else value

    return transform


def _positive_decay(tensor: torch.Tensor) -> torch.Tensor:
    return -parts.negative_exponential_column(tensor)


def _delta_layer(config: Any, mixer: Module) -> Rules:
    names = {"ssm_beta": "b_proj"}
    if _is_ling(config):
        names |= {"ssm_f_a": "forget_gate.f_proj", "ssm_g_a": "g_proj"}
    else:
        names |= {f"ssm_f_{part}": f"forget_gate.f_{part}_proj" for part in "ab"}
        names |= {f"ssm_g_{part}": f"g_{part}_proj" for part in "ab"}
    decay = _positive_decay if _is_ling(config) else parts.negative_exponential_column
    return [
        *parts.attention_layer(mixer),
        *mixer.weights(names),
        *(
            mixer.tensor(f"ssm_conv1d_{part}.weight", "conv1d.weight", _third(index))
            for index, part in enumerate("qkv")
        ),
        mixer.tensor("ssm_a", "forget_gate.A_log", decay),
        mixer.tensor("ssm_dt.bias", "forget_gate.dt_bias"),
        *mixer.weights({"ssm_norm": "o_norm"}),
    ]


def _attention_layer(config: Any, attention: Module) -> Rules:
    names = {"attn_gate": "g_proj"} if _is_ling(config) else {}
    names |= {
        "attn_q": "q_proj",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa",
        "attn_kv_a_norm": "kv_a_layernorm",
    }
    return [
        *attention.weights(names),
        # llama.cpp multiplies with the transpose, whose rows cross the blocks of a quantized matrix.
        *attention.weights({"attn_k_b": "kv_b_proj"}, _of_latent(config, keys=True)),
        *attention.weights({"attn_v_b": "kv_b_proj"}, _of_latent(config, keys=False)),
        *attention.weights({"attn_output": "o_proj"}),
    ]


def _layer(config: Any, layer: Module) -> Rules:
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    full = config.layer_types[layer.index] == "full_attention"
    attention = _attention_layer if full else _delta_layer
    rules = layer.weights(names) + attention(config, layer.inside("self_attn"))
    mlp = layer.inside("mlp")
    if layer.index < _dense_layers(config):
        return rules + parts.gated_mlp(mlp)
    return [
        *rules,
        *parts.gated_experts(mlp),
        *parts.gated_mlp(mlp.inside("shared_experts"), "_shexp"),
        mlp.tensor("exp_probs_b.bias", "gate.e_score_correction_bias"),
    ]


def _refusals(config: Any) -> Reasons:
    if "dense" in config.mlp_layer_types[_dense_layers(config) :]:
        yield "llama.cpp expects layers without experts first, but this model has them elsewhere"
    if config.linear_num_heads != config.num_attention_heads:
        yield "llama.cpp expects as many heads in linear attention as in attention"
    if _is_ling(config) and not config.kda_safe_gate:
        yield "its forget gate has no lower bound (kda_safe_gate), but llama.cpp's bailingmoe3 requires one"
    if getattr(config, "q_lora_rank", None) is not None:
        yield "its queries come from their own latent (q_lora_rank), which llama.cpp does not compute"
    if config.tie_word_embeddings and not _is_ling(config):
        yield "its head is tied to the embedding, but llama.cpp's kimi-linear needs a separate head"
    yield from parts.refuse_expert_weights(config)
    yield from parts.refusals(config, "attention_bias")


def _notes(config: Any) -> Reasons:
    if config.rms_norm_eps != _EPSILON:
        yield (
            f"llama.cpp normalises queries, keys and the attention's latent with epsilon {config.rms_norm_eps:g}, "
            f"transformers with {_EPSILON:g}"
        )


_NAMES = {"kimi_linear": "kimi-linear", "bailing_hybrid": "bailingmoe3"}
ARCHITECTURE = Architecture(_NAMES, _metadata, _layer, _refusals, _notes)
