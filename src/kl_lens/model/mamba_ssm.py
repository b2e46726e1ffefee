"""The layout of the original `state-spaces/*` checkpoints, made by the mamba_ssm package.

Their config.json has `d_model`, `n_layer` and `ssm_cfg` and no `model_type`; the vocabulary is padded to a multiple;
there is no tokenizer. The weights are those of transformers' Mamba and Mamba-2 under nearly the same names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.model.files import weight_files


def is_layout(config: dict[str, Any]) -> bool:
    return "model_type" not in config and {"d_model", "n_layer", "vocab_size"} <= set(config)


def load(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """A transformers model with the folder's weights."""
    with torch.device("meta"):  # takes no memory until the shapes are checked
        model: Any = empty_model(folder, config)
    weights = _read_weights(folder)
    if "lm_head.weight" not in weights and config.get("tie_embeddings", True):
        weights["lm_head.weight"] = weights.get("backbone.embeddings.weight", torch.empty(0))
    _check_shapes(folder, model.state_dict(), weights)
    model.load_state_dict({name: w.to(dtype, copy=True) for name, w in weights.items()}, assign=True)
    if config.get("tie_embeddings", True):
        model.lm_head.weight = model.get_input_embeddings().weight
    return model


def empty_model(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """The transformers model for a configuration, without weights."""
    _refuse_what_transformers_lacks(folder, config)
    try:
        if (config.get("ssm_cfg") or {}).get("layer", "Mamba1") == "Mamba2":
            return transformers.Mamba2ForCausalLM(mamba2_config(config))
        return transformers.MambaForCausalLM(mamba1_config(config))
    except Exception as error:  # a library may raise anything for a strange setting
        raise CheckpointError(
            f"{folder / 'config.json'} does not describe a model: {type(error).__name__}: {one_line(error)}"
        ) from error


def padded_vocabulary(config: dict[str, Any]) -> int:
    multiple = int(config.get("pad_vocab_size_multiple", 8))
    return math.ceil(int(config["vocab_size"]) / multiple) * multiple


def mamba1_config(config: dict[str, Any]) -> transformers.MambaConfig:
    settings = config.get("ssm_cfg") or {}
    rank = settings.get("dt_rank", "auto")
    return transformers.MambaConfig(
        **_of_both(config, settings),
        state_size=settings.get("d_state", 16),
        time_step_rank=math.ceil(config["d_model"] / 16) if rank == "auto" else rank,
    )


def mamba2_config(config: dict[str, Any]) -> transformers.Mamba2Config:
    settings = config.get("ssm_cfg") or {}
    width = settings.get("headdim", 64)
    return transformers.Mamba2Config(
        **_of_both(config, settings),
        state_size=settings.get("d_state", 128),
        head_dim=width,
        num_heads=settings.get("expand", 2) * config["d_model"] // width,
        n_groups=settings.get("ngroups", 1),
        chunk_size=settings.get("chunk_size", 256),
    )


def _of_both(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": padded_vocabulary(config),
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layer"],
        "conv_kernel": settings.get("d_conv", 4),
        "expand": settings.get("expand", 2),
        "use_conv_bias": settings.get("conv_bias", True),
        "use_bias": settings.get("bias", False),
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "tie_word_embeddings": config.get("tie_embeddings", True),
    }


def _refuse_what_transformers_lacks(folder: Path, config: dict[str, Any]) -> None:
    """Raises for settings of mamba_ssm that transformers' classes would compute differently."""
    settings = config.get("ssm_cfg") or {}
    refused = {
        "attention layers (attn_layer_idx)": bool(config.get("attn_layer_idx")),
        "MLP layers (d_intermediate)": bool(config.get("d_intermediate")),
        "LayerNorm (rms_norm false)": config.get("rms_norm", True) is False,
        f"layer {settings.get('layer')!r}": settings.get("layer", "Mamba1") not in ("Mamba1", "Mamba2"),
        "a gate after the norm (norm_before_gate)": bool(settings.get("norm_before_gate")),
        "no gated norm (rmsnorm false)": settings.get("rmsnorm", True) is False,
        "one D per channel (D_has_hdim)": bool(settings.get("D_has_hdim")),
    }
    for what, present in refused.items():
        if present:
            raise CheckpointError(
                f"{folder}: this mamba_ssm checkpoint has {what}, which transformers' Mamba classes do not "
                "compute; use a checkpoint in the transformers layout"
            )


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            weights.update(load_file(path))
            continue
        try:
            weights.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception as error:  # the unpickler raises many kinds of errors
            raise CheckpointError(
                f"{path} is damaged or holds more than tensors ({one_line(error, 80)}); convert it to safetensors with "
                "the tool that made it"
            ) from error
    return {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in weights.items()}


def _check_shapes(folder: Path, wanted: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    missing = sorted(set(wanted) - set(weights))
    if missing:
        raise CheckpointError(f"{folder}: the weights lack {missing[0]}; config.json and weights do not fit")
    extra = sorted(set(weights) - set(wanted))
    if extra:
        raise CheckpointError(f"{folder}: the weights have {extra[0]}, which config.json does not describe")
    for name, tensor in wanted.items():
        if tuple(weights[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {tuple(weights[name].shape)}, config.json asks for "
                f"{tuple(tensor.shape)}; weights and config.json do not belong together"
            )
