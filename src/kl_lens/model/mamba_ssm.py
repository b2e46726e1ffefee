"""The layout of the original `state-spaces/*` checkpoints, made by the mamba_ssm package.

Their config.json has `d_model`, `n_layer` and `ssm_cfg` and no `model_type`; the vocabulary is padded to a multiple;
there is no tokenizer. The weights are those of transformers' Mamba and Mamba-2 under nearly the same names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import transformers

from kl_lens.base.errors import CheckpointError
from kl_lens.model.files import refusing


def is_layout(config: dict[str, Any]) -> bool:
    return "model_type" not in config and config.keys() >= {
        "d_model",
        "n_layer",
        "vocab_size",
    }


def configuration(folder: Path, config: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' configuration of the same model. Raises for what transformers' classes compute differently."""
    settings = config.get("ssm_cfg") or {}
    layer = settings.get("layer", "Mamba1")
    refused = {
        "attention layers (attn_layer_idx)": bool(config.get("attn_layer_idx")),
        "MLP layers (d_intermediate)": bool(config.get("d_intermediate")),
        "LayerNorm (rms_norm false)": config.get("rms_norm", True) is False,
        f"layer {layer!r}": layer not in ("Mamba1", "Mamba2"),
        "a gate after the norm (norm_before_gate)": bool(
            settings.get("norm_before_gate")
        ),
        "no gated norm (rmsnorm false)": settings.get("rmsnorm", True) is False,
        "one D per channel (D_has_hdim)": bool(settings.get("D_has_hdim")),
        "channels beside the scan (d_ssm)": settings.get("d_ssm") is not None,
    }
    if unsupported := [name for name, present in refused.items() if present]:
        raise CheckpointError(
            f"{folder} has {unsupported[0]}, which transformers' Mamba does not compute"
        )
    with refusing(f"{folder}: config.json is not of a model"):
        width = config["d_model"]
        multiple = int(config.get("pad_vocab_size_multiple", 8))
        common = {
            "vocab_size": math.ceil(int(config["vocab_size"]) / multiple) * multiple,
            "hidden_size": width,
            "num_hidden_layers": config["n_layer"],
            "conv_kernel": settings.get("d_conv", 4),
            "expand": settings.get("expand", 2),
            "use_conv_bias": settings.get("conv_bias", True),
            "use_bias": settings.get("bias", False),
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": config.get("residual_in_fp32", True),
            "tie_word_embeddings": config.get("tie_embeddings", True),
        }
        if layer == "Mamba1":
            return transformers.MambaConfig(
                **common,
                state_size=settings.get("d_state", 16),
                time_step_rank=settings.get("dt_rank", "auto"),
            )
        head = settings.get("headdim", 64)
        return transformers.Mamba2Config(
            **common,
            state_size=settings.get("d_state", 128),
            head_dim=head,
            num_heads=common["expand"] * width // head,
            n_groups=settings.get("ngroups", 1),
            chunk_size=settings.get("chunk_size", 256),
            time_step_limit=tuple(settings.get("dt_limit", (0.0, math.inf))),
        )
