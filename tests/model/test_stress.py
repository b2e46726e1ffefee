"""stress(): outlier channels where we want them, and not a bit of difference in what the model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.stress import stress

from kl_lens.base.errors import CheckpointError
from kl_lens.model import LoadedModel
from kl_lens.weights.formats import get_format
from tests.families import tiny_model, token_ids


def _model(family: str) -> LoadedModel:
    return LoadedModel(family, Path(), tiny_model(family), None)


STRESSABLE = {
    "mamba": {"in_proj", "dt_proj"},
    "mamba2": {"in_proj", "out_proj"},
    "falcon_h1": {"in_proj", "out_proj", "q_proj", "o_proj", "gate_proj", "down_proj"},
    "jamba": {"in_proj", "q_proj", "o_proj", "down_proj"},
    "nemotron_h": {"in_proj", "out_proj", "q_proj", "o_proj", "up_proj"},
    "llama": {"q_proj", "o_proj", "gate_proj", "down_proj"},
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


def test_planted_channels_are_outliers_and_make_the_component_sensitive() -> None:
    model, ids = _model("mamba2"), token_ids(4, 21)
    name = "backbone.layers.1.mixer.out_proj"
    weight = model.model.get_submodule(name).weight
    int4 = get_format("int4")
    reference = model.chain.full_logits(ids)

    def damage() -> float:
        original = weight.detach().clone()
        weight.data.copy_(int4.roundtrip(original, name))
        moved = float((model.chain.full_logits(ids) - reference).pow(2).mean())
        weight.data.copy_(original)
        return moved

    before = damage()
    (planted,) = stress(model, r"layers\.1\.mixer\.out_proj", channels=1, factor=64)
    assert planted.components == (name,)
    column = weight[:, planted.channels[0]].abs().median()
    assert column > 10 * weight.abs().median()
    assert damage() > 10 * before


def test_what_cannot_be_stressed_is_an_error_that_says_what_can() -> None:
    with pytest.raises(CheckpointError, match=r"no component .* matches 'x_proj'.*dt_proj, in_proj"):
        stress(_model("mamba"), "x_proj")
    with pytest.raises(CheckpointError, match="no power of two"):
        stress(_model("mamba"), factor=10)


def test_an_architecture_wired_otherwise_is_left_untouched() -> None:
    """Gemma-2's norms multiply by 1 + weight: rescaling them does something else, and that is noticed."""
    model, ids = _model("gemma2"), token_ids(1, 9)
    before = model.chain.full_logits(ids)
    with pytest.raises(CheckpointError, match="undone"):
        stress(model, "gate_proj")
    assert torch.equal(model.chain.full_logits(ids), before)
