"""stress(): outlier channels where we want them, and not a bit of difference in what the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.stress import stress

from kl_lens.base.errors import CheckpointError
from kl_lens.model import LoadedModel
from tests.families import tiny_model, token_ids


def _model(family: str) -> LoadedModel:
    return LoadedModel(family, Path(), tiny_model(family), None)


STRESSABLE = {
    "mamba": {"in_proj", "dt_proj"},
    "mamba2": {"in_proj", "out_proj"},
    "falcon_h1": {"in_proj", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"},
    "nemotron_h": {"in_proj", "out_proj", "q_proj", "o_proj", "up_proj"},
}


@pytest.mark.parametrize("family", STRESSABLE)
def test_outputs_do_not_change(family: str) -> None:
    model, ids = _model(family), token_ids(2, 21)
    before = model.chain.full_logits(ids)
    planted = stress(model, factor=64)
    after = model.chain.full_logits(ids)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    kinds = {name.rpartition(".")[2] for p in planted for name in p.components}
    assert kinds >= STRESSABLE[family]


def test_what_cannot_be_stressed_is_an_error_that_says_what_can() -> None:
    """Gemma-2's norms multiply by 1 + weight: rescaling them does something else, and that is noticed."""
    with pytest.raises(CheckpointError, match=r"no component .* matches 'x_proj'.*dt_proj, in_proj"):
        stress(_model("mamba"), "x_proj")
    with pytest.raises(CheckpointError, match="no power of two"):
        stress(_model("mamba"), factor=10)
    model, ids = _model("gemma2"), token_ids(1, 9)
    before = model.chain.full_logits(ids)
    with pytest.raises(CheckpointError, match="undone"):
        stress(model, "gate_proj")
    assert torch.equal(model.chain.full_logits(ids), before)
