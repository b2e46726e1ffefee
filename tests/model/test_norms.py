"""Mamba-2 with several groups computes what its authors' code computes, and not what transformers does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kl_lens.model import LoadedModel, load
from tests import families
from tests.families import tiny_model, token_ids

IDS = token_ids(2, 21)


def _rms(x: Tensor, weight: Tensor, epsilon: float, groups: int = 1) -> Tensor:
    parts = x.unflatten(-1, (groups, -1))
    parts = parts / (parts.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return parts.flatten(-2) * weight


def test_mamba2_with_groups_is_another_model_than_transformers_alone_makes_of_it(
    saved,
) -> None:
    folder = saved("mamba2_groups")
    in_memory = load(folder)
    on_disk = load(folder, weights="disk")
    logits = in_memory.chain.full_logits(IDS)
    torch.testing.assert_close(
        on_disk.chain.full_logits(IDS), logits, rtol=1e-4, atol=1e-4
    )
    assert in_memory.fingerprint == on_disk.fingerprint
    assert in_memory.fingerprint.endswith("-grouped-norm"), (
        "a run of the other norm is not gone on with"
    )
    with torch.inference_mode():
        assert (
            tiny_model("mamba2_groups")(IDS, use_cache=False).logits - logits
        ).abs().max() > 0.1


@pytest.mark.parametrize("family", ["mamba2", "bamba", "granitemoehybrid"])
def test_each_group_is_normalised_by_itself(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mamba_ssm does: `group_size = d_ssm // ngroups`."""
    config = families.CONFIGS[family]()
    setattr(config, "n_groups" if family == "mamba2" else "mamba_n_groups", 2)
    monkeypatch.setitem(families.CONFIGS, family, lambda: config)
    model = LoadedModel(family, Path(), tiny_model(family), None)
    norms = [
        m for m in model.model.modules() if type(m).__name__.endswith("RMSNormGated")
    ]
    assert norms
    for norm in norms:
        x, gate = torch.randn(2, 3, 5, norm.weight.numel())
        expected = _rms(x * functional.silu(gate), norm.weight, norm.variance_epsilon, 2)
        torch.testing.assert_close(norm(x, gate), expected)
