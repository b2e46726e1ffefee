"""Tiny random models of every supported family, from the real transformers classes."""

import functools
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kl_lens.model import LoadedModel, architectures as models
from kl_lens.model.architectures.hymba import HymbaConfig
from kl_lens.model.chain import Chain
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.session import Session
from kl_lens.weights.recipes import Recipe

for model_type in (models.HYMBA, models.MAMBAVISION):
    models.register(model_type)
VOCABULARY = 97

Config = Callable[..., transformers.PretrainedConfig]
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_ONE_GROUP = {
    **_MAMBA2,
    "mamba_n_groups": 1,
}  # as published Bamba and Granite checkpoints have it
_HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def _bare(config: str | type, **settings: Any) -> Config:
    def make(**changes: Any) -> transformers.PretrainedConfig:
        arguments = (
            getattr(transformers, config) if isinstance(config, str) else config
        )  # older versions lack some
        return arguments(**{**_COMMON, **settings, **changes})

    return make


def _tiny(config: str | type, **settings: Any) -> Config:
    return _bare(config, **{**_ATTENTION, "num_hidden_layers": 4, **settings})


_mamba2 = _bare(
    "Mamba2Config",
    num_hidden_layers=4,
    state_size=16,
    num_heads=8,
    head_dim=16,
    n_groups=1,
    chunk_size=16,
)
_jamba = _tiny(
    "JambaConfig",
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=1,
    num_experts_per_tok=1,
    mamba_d_state=8,
    mamba_dt_rank=5,
)
CONFIGS: dict[str, Config] = {
    "mamba": _bare("MambaConfig", num_hidden_layers=4, state_size=8, time_step_rank=5),
    "falcon_mamba": _bare(
        "FalconMambaConfig", num_hidden_layers=3, state_size=8, time_step_rank=5
    ),
    "mamba2": _mamba2,
    "falcon_h1": _tiny(
        "FalconH1Config",
        **_MAMBA2,
        num_hidden_layers=3,
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        lm_head_multiplier=0.5,
        embedding_multiplier=2.0,
        key_multiplier=0.7,
        ssm_multipliers=[0.9, 0.8, 0.7, 1.1, 1.2],
    ),
    "zamba2": _tiny(
        "Zamba2Config",
        num_hidden_layers=7,
        layers_block_type=["mamba", "hybrid"] * 3 + ["mamba"],
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=16,
        num_mem_blocks=2,
        num_key_value_heads=4,
        chunk_size=16,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        use_mem_rope=True,
    ),
    "jamba": _jamba,
    "jamba_experts": functools.partial(_jamba, num_experts=4, num_experts_per_tok=2),
    "bamba": _tiny("BambaConfig", **_ONE_GROUP, attn_layer_indices=[1, 3]),
    "nemotron_h": _bare(
        "NemotronHConfig",
        **_ATTENTION,
        layers_block_type=["mamba", "mlp", "attention", "moe", "mamba", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        **_EXPERTS,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=48,
        n_group=1,
        topk_group=1,
    ),
    "granitemoehybrid": _tiny(
        "GraniteMoeHybridConfig",
        **_ONE_GROUP,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        logits_scaling=3.0,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
    ),
    "llama": _tiny("LlamaConfig", num_hidden_layers=3),
    # Not a promised family: it has a soft cap behind the head and tied weights, which nothing else here has.
    "gemma2": _tiny(
        "Gemma2Config", num_hidden_layers=2, head_dim=16, final_logit_softcapping=5.0
    ),
}

# Built otherwise than the promised families: what the chain and the anatomy must not be fooled by.
UNUSUAL: dict[str, Config] = {
    # transformers normalises otherwise than the authors
    "mamba2_groups": functools.partial(_mamba2, n_groups=2),
    # each block hands a router state to the next
    "zaya": _bare(
        "ZayaConfig",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=48,
        router_hidden_size=16,
    ),
    # the last blocks take keys and values from a dictionary that earlier ones fill
    "gemma4_text": _tiny(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=16,
        num_kv_shared_layers=2,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    # a sliding window shorter than the text: below its length there is no mask at all
    "mistral": _tiny("MistralConfig", num_hidden_layers=3, sliding_window=8),
    # gates are stacks of matrices, input-major; attention with a sliding window
    "recurrent_gemma": _tiny(
        "RecurrentGemmaConfig",
        num_hidden_layers=3,
        num_key_value_heads=1,
        lru_width=64,
        attention_window_size=8,
    ),
    # x_proj and dt_proj are stacks of matrices, one for each head, and no modules
    "zamba": _tiny(
        "ZambaConfig",
        hidden_size=96,
        layers_block_type=["mamba", "hybrid"] * 2,
        num_key_value_heads=4,
        attention_hidden_size=192,
        attention_head_dim=48,
        mamba_d_state=8,
        mamba_dt_rank=5,
        n_mamba_heads=2,
    ),
    # halves its hidden states after every second block, unless it is told not to
    "rwkv": _bare("RwkvConfig", num_hidden_layers=4, rescale_every=2),
    # meta tokens, a window shorter than the text, keys and values that neighbours share; not transformers' own
    "hymba": _tiny(
        HymbaConfig,
        num_hidden_layers=5,
        global_attn_idx=[0, 4],
        kv_reuse_group=[[1, 2, 3]],
        sliding_window=6,
        num_memory_tokens=3,
        mamba_d_state=8,
        mamba_dt_rank=5,
    ),
}

# What else docs/models.md tells of: short convolutions, linear attention, and the transformers people use most.
OTHERS: dict[str, Config] = {
    "lfm2": _tiny("Lfm2Config", layer_types=["conv", "full_attention", "conv", "conv"]),
    "lfm2_moe": _tiny(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_dense_layers=1,
        num_experts=4,
        **_EXPERTS,
    ),
    "qwen3_next": _tiny(
        "Qwen3NextConfig",
        hidden_size=96,
        layer_types=_HYBRID,
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=48,
        **_EXPERTS,
        **_DELTA,
    ),
    "qwen3_5_text": _tiny(
        "Qwen3_5TextConfig",
        hidden_size=96,
        layer_types=_HYBRID,
        head_dim=16,
        **{**_DELTA, "linear_num_key_heads": 4},
    ),
    "qwen3_5_moe_text": _tiny(
        "Qwen3_5MoeTextConfig",
        layer_types=_HYBRID,
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=48,
        **_EXPERTS,
        **_DELTA,
    ),
    "kimi_linear": _tiny(
        "KimiLinearConfig",
        layer_types=_HYBRID,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=4,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_key_value_heads=4,
        **_EXPERTS,
        **_LATENT,
    ),
    "olmo_hybrid": _tiny(
        "OlmoHybridConfig", layer_types=_HYBRID, **{**_DELTA, "linear_num_key_heads": 4}
    ),
    "minimax": _tiny(
        "MiniMaxConfig",
        layer_types=_HYBRID,
        head_dim=16,
        num_local_experts=4,
        block_size=16,
    ),
    "bailing_hybrid": _tiny(
        "BailingHybridConfig",
        layer_types=_HYBRID,
        head_dim=16,
        num_local_experts=4,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_key_value_heads=4,
        **_EXPERTS,
        **_LATENT,
    ),
    "inkling_text": _tiny(
        "InklingTextConfig",
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_mtp_layers=0,
        **_EXPERTS,
    ),
    "qwen4_exp_text": _tiny(
        "Qwen4ExpTextConfig",
        layer_types=_HYBRID,
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=48,
        hc_lowrank=8,
        hc_count=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=64,
        indexer_compress_ratio=4,
        **_EXPERTS,
        **_DELTA,
    ),
    "xlstm": _bare("xLSTMConfig", num_hidden_layers=3, num_heads=4, chunk_size=16),
    "qwen2": _tiny("Qwen2Config"),
    "qwen3": _tiny("Qwen3Config", head_dim=16),
    "qwen3_moe": _tiny(
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=4,
        norm_topk_prob=True,
        **_EXPERTS,
    ),
    "granite": _tiny("GraniteConfig", logits_scaling=3.0, residual_multiplier=0.5),
    "olmo2": _tiny("Olmo2Config"),
    "smollm3": _tiny("SmolLM3Config"),
    "gemma": _tiny("GemmaConfig", hidden_size=96, head_dim=16),
    "gemma3_text": _tiny(
        "Gemma3TextConfig",
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
    ),
    "phi": _tiny("PhiConfig"),
    "phi3": _tiny("Phi3Config"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4
    ),
    "gpt_neox": _tiny("GPTNeoXConfig", intermediate_size=256),
    "mixtral": _tiny("MixtralConfig", num_local_experts=4),
    "gpt_oss": _tiny(
        "GptOssConfig",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    ),
    "deepseek_v3": _tiny(
        "DeepseekV3Config",
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **_EXPERTS,
        **_LATENT,
    ),
}


def plain(model: LoadedModel) -> LoadedModel:
    """The model with PyTorch's own kernels: ours would be compiled first, which takes longer than most tests."""
    vars(model)["chain"] = Chain(model.model, fast=False, task=model.task)
    return model


def tiny_model(
    family: str, seed: int = 0, vocabulary: int | None = None
) -> torch.nn.Module:
    """A random model of the family, in float32, with every parameter away from zero and one."""
    torch.manual_seed(seed)
    config = (CONFIGS | UNUSUAL | OTHERS)[family]()
    config.vocab_size = vocabulary or config.vocab_size
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" in name or name.endswith((".D", ".D.0")):
                parameter.uniform_(0.7, 1.3)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model


def slow(*case: Any) -> Any:
    """A case of a table that only ./test --all runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_ids(batch: int, time: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, time), generator=generator)


def fed(session: Session, ids: torch.Tensor, *sizes: int) -> np.ndarray:
    """Logits after each of several parts of a text, from its start on."""
    session.reset()
    return np.stack([session.prefill(part.tolist()) for part in ids[0].split(sizes)])


def in_turn(model: LoadedModel, formats: Sequence[str]) -> Plan:
    """Every format in turn."""
    names = [component.name for component in model.anatomy.candidates]
    return Plan("mixed", dict(zip(names, cycle(formats), strict=False)), "test")


def with_stored_weights(model: LoadedModel, artifact: Artifact) -> None:
    """The model computes with the weights of its file from now on."""
    realised = {tensor.component: tensor.realised for tensor in artifact.tensors}
    for component in model.anatomy.candidates:
        recipe = Recipe.parse(realised[component.name])
        values = model.weights.values(component.name, recipe)
        for parameter in model.parameters_of(component):
            parameter.data.copy_(values)
