"""Tiny models of what llama.cpp can hold, plans for them, and comparisons."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kl_lens.model.anatomy import component_name
from kl_lens.model.kernels import fast_kernels
from kl_lens.model.opening import LoadedModel
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.gguf.header import TensorEntry
from kl_lens.targets.gguf.writer import ModelTensors
from kl_lens.weights.formats import get_format, known_formats
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.recipes import Recipe
from tests import families
from tests.families import Config

# That files hold, but for F16.
FORMATS = [name for name in known_formats() if name.startswith(("q", "iq", "mxfp"))]
_COMMON = families._COMMON
_ATTENTION = families._ATTENTION
_ONE_GROUP = families._ONE_GROUP


def _falcon_h1(**changes: Any) -> transformers.PretrainedConfig:
    config = families.CONFIGS["falcon_h1"]()
    settings = {
        "mamba_norm_before_gate": False,
        "attention_in_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "attention_out_multiplier": 1.4,
        "mlp_multipliers": [0.9, 1.2],
    }
    for name, value in (settings | changes).items():
        setattr(config, name, value)
    return config


def _granite(**changes: Any) -> transformers.PretrainedConfig:
    settings = {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    }
    common = _COMMON | _ATTENTION | _ONE_GROUP
    return transformers.GraniteMoeHybridConfig(**(common | settings | changes))


def _nemotron(feed_forward: str, **changes: Any) -> transformers.PretrainedConfig:
    settings = {
        "layers_block_type": ["mamba", feed_forward, "attention", "mamba", feed_forward],
        "head_dim": 16,
        "mamba_num_heads": 6,  # an inner size that is no multiple of the width: older llama.cpp aborted
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
    }
    return transformers.NemotronHConfig(**(_COMMON | _ATTENTION | settings | changes))


def _qwen3_5() -> transformers.PretrainedConfig:
    """Heads of 32, so that a format with blocks of 32 fits into one."""
    return families.OTHERS["qwen3_5_text"](
        linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32
    )


# Heads that share keys, and of another size than width / heads.
_UNEVEN = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
}
_EVEN = _UNEVEN | {"head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


def _uneven(name: str, **settings: Any) -> Config:
    return families._bare(name, **{**_UNEVEN, "rope_parameters": _ROPE, **settings})


def _long_rope(dimensions: int) -> dict[str, Any]:
    half = dimensions // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0 + index / half for index in range(half)],
        "long_factor": [2.0 + 2 * index for index in range(half)],
        "original_max_position_embeddings": 512,
    }


def _gemma3(**settings: Any) -> Config:
    rope = {"sliding_attention": _ROPE, "full_attention": _LINEAR}
    common = {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "sliding_window": 8}
    return _uneven("Gemma3TextConfig", rope_parameters=rope, **common, **settings)


CONFIGS: dict[str, Config] = {
    "llama": _uneven("LlamaConfig"),
    "llama tied, with biases": _uneven(
        "LlamaConfig", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama 3": _uneven("LlamaConfig", rope_parameters=_LLAMA_3),
    "llama with yarn": _uneven("LlamaConfig", rope_parameters=_YARN),
    "mistral": _uneven("MistralConfig", sliding_window=None, tie_word_embeddings=True),
    "mistral with linear rope": _uneven(
        "MistralConfig", sliding_window=None, rope_parameters=_LINEAR
    ),
    "qwen2": _uneven("Qwen2Config", head_dim=16),
    "qwen2 tied, with yarn": _uneven(
        "Qwen2Config", head_dim=16, tie_word_embeddings=True, rope_parameters=_YARN
    ),
    "qwen3": _uneven("Qwen3Config"),
    "qwen3 tied, with yarn": _uneven(
        "Qwen3Config", tie_word_embeddings=True, rope_parameters=_YARN
    ),
    "qwen3_moe": _uneven(
        "Qwen3MoeConfig", num_experts=4, norm_topk_prob=True, **families._EXPERTS
    ),
    "gemma3_text": _gemma3(),
    "gemma3_text untied, capped": _gemma3(
        tie_word_embeddings=False, final_logit_softcapping=5.0
    ),
    "phi3": _uneven("Phi3Config", head_dim=16),
    "phi3 tied, with longrope": _uneven(
        "Phi3Config",
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters=_long_rope(16),
    ),
    "granite": _uneven(
        "GraniteConfig",
        logits_scaling=3.0,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "granite tied, with biases": _uneven(
        "GraniteConfig",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_LLAMA_3,
    ),
    "olmo2": _uneven("Olmo2Config", head_dim=16),
    "olmo2 with yarn": _uneven("Olmo2Config", head_dim=16, rope_parameters=_YARN),
    "gpt2": families.OTHERS["gpt2"],
    "smollm3": _uneven("SmolLM3Config", num_hidden_layers=5),
    "smollm3 untied, with linear rope": _uneven(
        "SmolLM3Config",
        num_hidden_layers=5,
        tie_word_embeddings=False,
        rope_parameters=_LINEAR,
    ),
    "mamba": families.CONFIGS["mamba"],
    "mamba without convolution bias": lambda: transformers.MambaConfig(
        **_COMMON, num_hidden_layers=2, state_size=8, use_conv_bias=False
    ),
    "falcon_mamba": lambda: families.CONFIGS["falcon_mamba"](mixer_rms_eps=1e-5),
    "mamba2": families.CONFIGS["mamba2"],
    "mamba2 with groups": families.UNUSUAL["mamba2_groups"],
    "jamba": families.CONFIGS["jamba"],
    "jamba with experts": families.CONFIGS["jamba_experts"],
    "falcon_h1": _falcon_h1,
    "falcon_h1 tied, without norm": lambda: _falcon_h1(
        mamba_rms_norm=False, tie_word_embeddings=True
    ),
    "granitemoehybrid": _granite,
    "granitemoehybrid dense, with rope": lambda: _granite(
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_multiplier=0.3,
    ),
    "granitemoehybrid of attention only": lambda: _granite(
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["attention"] * 4,
        position_embedding_type="rope",
    ),
    "granitemoehybrid with groups": lambda: _granite(mamba_n_groups=2),
    "bamba": families.CONFIGS["bamba"],
    "bamba with groups": lambda: transformers.BambaConfig(
        **_COMMON,
        **_ATTENTION,
        **families._MAMBA2,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
    ),
    "lfm2": families.OTHERS["lfm2"],
    "lfm2_moe": families.OTHERS["lfm2_moe"],
    "qwen3_5_text": families.OTHERS["qwen3_5_text"],
    "qwen3_5_text, two value heads to a key head": _qwen3_5,
    "qwen3_5_moe_text": families.OTHERS["qwen3_5_moe_text"],
    "qwen3_next": families.OTHERS["qwen3_next"],
    "kimi_linear": lambda: families.OTHERS["kimi_linear"](rms_norm_eps=1e-6),
    "bailing_hybrid": families.OTHERS["bailing_hybrid"],
    "bailing_hybrid with groups of experts": lambda: families.OTHERS["bailing_hybrid"](
        n_group=2
    ),
    "nemotron_h": lambda: _nemotron("mlp"),
    "nemotron_h with experts": lambda: _nemotron("moe"),
    # Without rope a head may have any size.
    "nemotron_h, heads of 3": lambda: _nemotron("mlp", head_dim=3),
    "granitemoehybrid, heads of 9": lambda: _granite(
        hidden_size=36, mamba_d_head=9, num_local_experts=0, num_experts_per_tok=0
    ),
}


def tiny(
    config: transformers.PretrainedConfig | str,
    tokenizer: Any | None = None,
    name: str = "tiny",
) -> LoadedModel:
    model = random_model(CONFIGS[config]() if isinstance(config, str) else config)
    return families.plain(LoadedModel(name, Path("."), model, tokenizer))


def random_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Every parameter (and the expert bias, a buffer) away from zero and one."""
    key = "gguf test"
    families.CONFIGS[key] = lambda: config
    try:
        model = families.tiny_model(key)
    finally:
        del families.CONFIGS[key]
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.uniform_(-0.3, 0.3)
    return model


_NORM = {"attention.layer_norm_epsilon": 1e-5}
_BASE = {"rope.freq_base": 5000.0}
_SIMILAR = {key: value for key, value in _UNEVEN.items() if key != "head_dim"}
_HALF = _ROPE | {"partial_rotary_factor": 0.5}
# Families that are written like a template only: llama.cpp's name → the configuration, and what its file says of it.
# transformers writes into the settings of rope that it is given.
TEMPLATES: dict[str, tuple[Config, dict[str, Any]]] = {
    "stablelm": (
        families._bare("StableLmConfig", **_SIMILAR, rope_parameters={**_ROPE}),
        {**_NORM, **_BASE, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "starcoder2": (
        families._bare(
            "Starcoder2Config",
            **_SIMILAR,
            sliding_window=None,
            rope_parameters={**_ROPE},
        ),
        {**_NORM, **_BASE},
    ),
    "glm4": (
        families._bare("Glm4Config", **_EVEN, rope_parameters=_HALF),
        {
            **_BASE,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 8,
        },
    ),
    # Queries, keys and values are one tensor in llama.cpp.
    "phi2": (
        families._bare("PhiConfig", **_SIMILAR, rope_parameters=_HALF),
        {**_NORM, **_BASE, "rope.dimension_count": 8},
    ),
}
_TEXTS = {"general.name": "Anything", "tokenizer.chat_template": "{{ messages }}"}


def like_a_template(
    family: str,
    folder: Path,
    kind: str = "F16",
    *,
    vocabulary: int = families.VOCABULARY,
    **settings: Any,
) -> tuple[LoadedModel, Path]:
    """A model that KL Lens has no table for, and llama.cpp's file of it, by gguf's own map of names."""
    config = TEMPLATES[family][0](vocab_size=vocabulary)
    config.norm_epsilon = config.layer_norm_eps = config.rms_norm_eps = 1e-5
    model = tiny(config)
    gguf = gguf_module()
    path = folder / f"{family}-{kind}.gguf"
    writer = gguf.GGUFWriter(path, family)
    for key, value in _TEXTS.items():
        writer.add_string(key, value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_array("tokenizer.ggml.tokens", [b"a", b"\xff\xfe", b"c"])
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for key, value in (common | TEMPLATES[family][1] | settings).items():
        add[type(value)](f"{family}.{key}", value)
    codes = {title: code for code, title in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[family], config.num_hidden_layers)
    stored: dict[str, list[torch.Tensor]] = {}
    for parameter, values in model.model.state_dict().items():
        name = names.get_name(parameter, (".weight", ".bias"))
        if family == "phi2":
            name = re.sub(r"attn_[qkv]\b", "attn_qkv", name)
        stored.setdefault(name, []).append(values.float())
    for name, parts in stored.items():
        joined = torch.cat(parts).numpy()
        type_of = gguf.GGMLQuantizationType[kind if joined.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(joined, type_of), raw_dtype=type_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def small_mamba(
    tokenizer: Any | None = None, name: str = "tiny", **changes: Any
) -> LoadedModel:
    """One block, and a row for each token."""
    vocabulary = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    settings = _COMMON | vocabulary | {"num_hidden_layers": 1, "state_size": 8} | changes
    return tiny(transformers.MambaConfig(**settings), tokenizer, name)


def matrices(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    """Component → shape, of everything with rows and columns (norms and biases have none)."""
    shapes = ModelTensors(model).shapes
    return {
        component_name(name, len(shape)): shape
        for name, shape in shapes.items()
        if len(shape) >= 2
    }


def uniform(model: LoadedModel, format_name: str) -> Plan:
    names = [
        n
        for n in matrices(model)
        if not n.endswith(("conv1d", "A_log", "router", "gate"))
    ]
    return Plan(format_name, dict.fromkeys(names, format_name), made_by="test")


def torch_logits(model: LoadedModel, windows: torch.Tensor) -> np.ndarray:
    """(windows · time, vocabulary) float32 from PyTorch."""
    bamba = model.config.model_type == "bamba"  # which is wrong without positions
    more = {"position_ids": torch.arange(windows.shape[1])[None]} if bamba else {}
    with torch.no_grad(), fast_kernels(model.model):
        return torch.cat(
            [model.model(window[None], **more).logits[0] for window in windows]
        ).numpy()


def quantize_weights(model: LoadedModel, artifact: Artifact) -> dict[str, Recipe]:
    """Puts the values of the file into the PyTorch model; returns component → realised recipe."""
    realised = {t.component: t.realised for t in artifact.tensors}
    planned = {t.component for t in artifact.tensors if t.realised != "fp32"}
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            component = component_name(name, parameter.dim())
            if component in planned:
                parameter.copy_(get_format(realised[component]).roundtrip(parameter))
    return {component: Recipe.parse(realised[component]) for component in planned}


def stored(entry: TensorEntry) -> bytes:
    """A tensor's bytes in its file."""
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.bytes)


def kl(teacher: np.ndarray, student: np.ndarray) -> tuple[float, float]:
    """Mean per token and its standard error."""
    p = torch.from_numpy(teacher).double().log_softmax(-1)
    q = torch.from_numpy(student).double().log_softmax(-1)
    per_token = (p.exp() * (p - q)).sum(-1)
    return float(per_token.mean()), float(per_token.std() / len(per_token) ** 0.5)
