"""Equivalent rescaling: the same model to the last digit of every weight, with outliers that are none any more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kl_lens.base.errors import CheckpointError
from kl_lens.measuring.statistics import gather
from kl_lens.measuring.statistics.rescaling import changed_weights, pairs, rescalings, write_rescaled
from kl_lens.model import LoadedModel, load
from kl_lens.weights.recipes import Recipe
from tests.families import tiny_model
from tests.measuring.statistics.test_gathering import _opened, _windows

NORM, READER = "backbone.layers.1.norm.weight", "backbone.layers.1.mixer.in_proj"


@pytest.mark.parametrize(
    ("family", "vector", "readers"),
    [
        ("mamba", "layers.0.norm.weight", ("in_proj",)),
        ("mamba2", "layers.0.mixer.norm.weight", ("out_proj",)),
        ("llama", "layers.1.input_layernorm.weight", ("q_proj", "k_proj", "v_proj")),
        ("llama", "layers.1.post_attention_layernorm.weight", ("gate_proj", "up_proj")),
    ],
)
def test_finds_which_norm_feeds_which_component(family: str, vector: str, readers: tuple[str, ...]) -> None:
    found = dict(pairs(_opened(family)))
    fed = next(kinds for name, kinds in found.items() if name.endswith(vector))
    assert {name.rpartition(".")[2] for name in fed} == set(readers)
    assert not any("bias" in name or name.endswith(".D") for name in found)


def _with_outliers() -> LoadedModel:
    model = _opened("mamba")
    model.model.get_parameter(NORM).data[[3, 40]] /= 64
    model.model.get_parameter(f"{READER}.weight").data[:, [3, 40]] *= 64
    return model


def test_planted_outliers_are_taken_back_and_the_model_stays(tmp_path: Path) -> None:
    model = _with_outliers()
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    found = {
        one.vector: one
        for one in rescalings(model, gather(model, _windows(12), tmp_path), Recipe("int4", "gptq"))
    }
    assert found[NORM].readers == (READER,)
    assert found[NORM].exponent > 0
    assert found[NORM].error < 0.5
    assert (found[NORM].factors[[3, 40]] < 0.1).all()
    changed = changed_weights(model, list(found.values()))
    assert torch.equal(
        changed[f"{READER}.weight"] / found[NORM].factors, before[f"{READER}.weight"]
    )  # bit for bit
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())


def test_the_written_checkpoint_is_another_with_the_same_logits(tmp_path: Path) -> None:
    tiny_model("mamba").save_pretrained(tmp_path / "tiny")
    model = load(tmp_path / "tiny")
    statistics = gather(model, _windows(4), tmp_path / "run")
    found = rescalings(model, statistics, Recipe("int4"))
    forced = [
        type(one)(one.vector, one.readers, 1.0, 1.0, torch.full_like(one.factors, 0.25)) for one in found
    ]
    write_rescaled(model, changed_weights(model, forced), tmp_path / "equivalent")
    again = load(tmp_path / "equivalent")
    ids = _windows(2).ids
    torch.testing.assert_close(again.chain.full_logits(ids), model.chain.full_logits(ids), rtol=0, atol=1e-4)
    assert again.fingerprint != model.fingerprint
    with pytest.raises(FileExistsError):
        write_rescaled(model, {}, tmp_path / "equivalent")
    with pytest.raises(CheckpointError, match="no safetensors file holds nowhere"):
        write_rescaled(model, {"nowhere": torch.ones(1)}, tmp_path / "other")
