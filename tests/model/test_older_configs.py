"""Checkpoints as the hub has them: config.json as older versions of transformers wrote it.

Names are those of published checkpoints; sizes are tiny, and tensors are named as there. These families are those of
which such a file could be taken for another layout, names code of its own, or is read by code of ours; the others are
opened by transformers alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kl_lens.model import load
from tests.families import tiny_model, token_ids

_MAMBA = {
    "d_inner": 128,
    "d_model": 64,
    "fused_add_norm": True,
    "n_layer": 4,
    "pad_vocab_size_multiple": 8,
    "rms_norm": True,
    "ssm_cfg": {},
    "rescale_prenorm_residual": False,
    "time_step_init_scheme": "random",
    "time_step_scale": 1.0,
}
# Family → version of transformers, names that its config.json does not have yet, and what it has instead.
OLDER: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "mamba": ("4.39.0.dev0", (), _MAMBA),
    "falcon_mamba": ("4.43.0.dev0", ("mixer_rms_eps",), _MAMBA | {"n_layer": 3}),
    "mamba2": (
        "4.44.0.dev0",
        (),
        {
            "norm_before_gate": True,
            "rms_norm": True,
            "time_step_limit": [0.0, float("inf")],
        },
    ),
    "jamba_experts": (
        "4.40.1",
        ("layers_block_type", "layer_types"),
        {
            "auto_map": {"AutoModelForCausalLM": "modeling_jamba.JambaForCausalLM"},
            "n_ctx": 262144,
            "calc_logits_for_entire_prompt": False,
            "mamba_inner_layernorms": True,
            "num_logits_to_keep": 1,
        },
    ),
    "nemotron_h": (
        "4.55.4",
        ("layers_block_type", "layer_types"),
        {
            "auto_map": {
                "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"
            },
            "hybrid_override_pattern": "M-*EM-",
            "mlp_hidden_act": "relu2",
            "use_mamba_kernels": True,
        },
    ),
    "kimi_linear": (
        "4.55.3",
        (
            "layer_types",
            "mlp_layer_types",
            "linear_head_dim",
            "linear_num_heads",
            "linear_conv_kernel_dim",
        ),
        {
            "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "head_dim": 16,
                "kda_layers": [1, 3],
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "hymba": (
        "4.44.0",
        (),
        {
            "auto_map": {
                "AutoConfig": "configuration_hymba.HymbaConfig",
                "AutoModelForCausalLM": "modeling_hymba.H",
            },
            "attn_implementation": "flex",
            "attn_implementation_new": "flex",
            "use_mamba_kernels": True,
        },
    ),
    "gpt_neox": (
        "4.24.0",
        ("rope_theta", "partial_rotary_factor"),
        {"rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True},
    ),
}


def _older(
    config: dict[str, Any], version: str, unknown: tuple[str, ...], names: dict[str, Any]
) -> dict[str, Any]:
    """Up to version 4.56 the type was `torch_dtype`, and rotary settings stood by themselves."""
    rope = {
        key: value
        for key, value in config.get("rope_parameters", {}).items()
        if not isinstance(value, dict)
    }
    if "rope_theta" in rope:
        rope |= {"rope_scaling": None}
    new = (*unknown, "dtype", "rope_parameters", "rope_type")
    settings = {key: value for key, value in (config | rope).items() if key not in new}
    return settings | {"torch_dtype": "float32", "transformers_version": version} | names


@pytest.mark.parametrize("family", OLDER)
def test_the_same_model_opens(family: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    original.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_older(json.loads(file.read_text()), *OLDER[family])))
    ids = token_ids(1, 16)
    opened = load(tmp_path).model
    with torch.inference_mode():
        logits, two = (
            model(ids, use_cache=False).logits for model in (opened, original.eval())
        )
    torch.testing.assert_close(logits, two, rtol=1e-4, atol=1e-4)
