"""Mamba-2 with several groups computes what its authors' code computes, and not what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from kl_lens.model import LoadedModel, load
from kl_lens.model.kernels.swap import _is_rms_norm
from tests import families
from tests.families import tiny_model, token_ids
from tests.model.test_kernels import recurrence2

IDS = token_ids(2, 21)


def _rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float, groups: int = 1) -> torch.Tensor:
    parts = x.unflatten(-1, (groups, -1))
    parts = parts / (parts.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return parts.flatten(-2) * weight


def _mamba2(weights: dict[str, torch.Tensor], config: transformers.Mamba2Config) -> torch.Tensor:
    """Mamba-2 token by token, from its definition: (batch, time, vocabulary). Nothing of transformers is in it."""
    heads, size, groups, states = config.num_heads, config.head_dim, config.n_groups, config.state_size
    inner, epsilon = heads * size, config.layer_norm_epsilon
    hidden = weights["backbone.embeddings.weight"][IDS]
    for index in range(config.num_hidden_layers):
        prefix = f"backbone.layers.{index}."
        w = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        normed = _rms(hidden, w["norm.weight"], epsilon)
        z, mixed, dt = (normed @ w["mixer.in_proj.weight"].T).split(
            [inner, inner + 2 * groups * states, heads], dim=-1
        )
        taps = w["mixer.conv1d.weight"]
        padded = functional.pad(mixed.transpose(1, 2), (taps.shape[-1] - 1, 0))
        mixed = functional.conv1d(padded, taps, w["mixer.conv1d.bias"], groups=len(taps))
        x, b, c = (
            functional.silu(mixed).transpose(1, 2).split([inner, groups * states, groups * states], dim=-1)
        )
        x, (b, c) = x.unflatten(-1, (heads, size)), (t.unflatten(-1, (groups, states)) for t in (b, c))
        dt = functional.softplus(dt + w["mixer.dt_bias"])
        scanned = recurrence2(x, dt, -torch.exp(w["mixer.A_log"]), b, c) + w["mixer.D"][:, None] * x
        gated = scanned.float().flatten(-2) * functional.silu(z)
        hidden = hidden + _rms(gated, w["mixer.norm.weight"], epsilon, groups) @ w["mixer.out_proj.weight"].T
    return _rms(hidden, weights["backbone.norm_f.weight"], epsilon) @ weights["lm_head.weight"].T


def test_mamba2_with_groups_is_what_its_definition_says(saved) -> None:
    original = tiny_model("mamba2_groups")
    expected = _mamba2(dict(original.state_dict()), original.config)
    folder = saved("mamba2_groups")
    in_memory, on_disk = load(folder), load(folder, weights="disk")
    for model in (in_memory, on_disk):
        torch.testing.assert_close(model.chain.full_logits(IDS), expected, rtol=1e-4, atol=1e-4)
    assert in_memory.fingerprint == on_disk.fingerprint
    assert in_memory.fingerprint.endswith("-grouped-norm"), "a run of the other norm is not gone on with"
    with torch.inference_mode():
        assert (original(IDS, use_cache=False).logits - expected).abs().max() > 0.1, (
            "transformers alone differs"
        )


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid"])
def test_hybrids_with_groups_normalise_each_by_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = families.CONFIGS[family]()
    config.mamba_n_groups = 2
    monkeypatch.setitem(families.CONFIGS, family, lambda: config)
    model = LoadedModel(family, Path(), tiny_model(family), None)
    norms = [m for m in model.model.modules() if type(m).__name__.endswith("RMSNormGated")]
    assert norms
    for norm in norms:
        x, gate = torch.randn(2, 3, 5, norm.weight.numel())
        expected = _rms(x * functional.silu(gate), norm.weight, norm.variance_epsilon, 2)
        torch.testing.assert_close(norm(x, gate), expected)


def test_the_gpu_norm_is_not_used_for_groups() -> None:
    """One class may have one group here and several there: each is tried by itself."""
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    assert _is_rms_norm(Zamba2RMSNormGated(64, 64))
    assert not _is_rms_norm(Zamba2RMSNormGated(64, 32))
