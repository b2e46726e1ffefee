"""States and caches as candidates: found, rounded where they are kept, measured like weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kl_lens.base.errors import KLLensError
from kl_lens.measuring.perturbation import (
    Candidate,
    applied,
    states_of,
)
from kl_lens.run.folder import STATES, Run
from kl_lens.run.records import KEYS, STATE, VALUES
from kl_lens.study.study import Study
from kl_lens.weights.recipes import Recipe
from tests.families import token_ids
from tests.measuring.conftest import loaded


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("mamba", {STATE}),
        ("mamba2", {STATE}),
        ("falcon_h1", {STATE, KEYS, VALUES}),
        ("jamba_experts", {STATE, KEYS, VALUES}),
    ],
)
def test_what_blocks_keep_is_what_the_cache_of_transformers_holds(
    family: str, kinds: set[str]
) -> None:
    model = loaded(family)
    states = states_of(model)
    assert {component.kind for component in states} == kinds
    cache = model.model(token_ids(1, 7), use_cache=True)
    cache = getattr(cache, "past_key_values", None) or cache.cache_params
    for component in states:
        layer = cache.layers[component.block]
        if component.kind == STATE:
            assert layer.recurrent_states[0].numel() == component.parameters
        else:
            assert getattr(layer, component.kind)[0, :, 0].shape == component.shape


def test_keys_are_rounded_where_attention_reads_them() -> None:
    """Against transformers' own code with the outputs of a layer's `v_proj` rounded."""
    model = loaded("falcon_h1")
    ids = token_ids(1, 12)
    component = next(c for c in states_of(model) if c.kind == VALUES and c.block == 1)
    attention = model.chain.blocks[1].self_attn
    rounded = Candidate(component, Recipe("int4")).perturbation
    with applied(model, rounded, [], None):
        actual = model.chain.full_logits(ids)

    def round_values(_module, _args, output):  # type: ignore[no-untyped-def]
        heads = output.unflatten(-1, component.shape).float()
        scale = (heads.abs().amax(-1, keepdim=True) / 7).half().float()
        return ((heads / scale).round().clamp(-7, 7) * scale).flatten(-2)

    with attention.v_proj.register_forward_hook(round_values), torch.no_grad():
        expected = model.model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, model.chain.full_logits(ids), atol=1e-4)


def test_a_sweep_resumes_and_is_shown_by_position(tmp_path: Path) -> None:
    study = Study("reference:hybrid", folder=tmp_path / "run")
    settings = {
        "states": True,
        "windows": 2,
        "window_length": 64,
        "components": r"\.(0|2)\.",
    }
    first = study.do(study.settings("measure", formats="int8,q8_0", **settings))
    assert {m.format for m in first.measurements} <= {"int8", "q8_0"}
    assert [len(curve.means) for curve in first.curves] == [4] * len(first.measurements)
    again = study.do(study.settings("measure", formats="int8,q8_0,int4", **settings))
    assert again.sweep.reused == first.sweep.measured
    assert again.measurements[: len(first.measurements)] == first.measurements
    with Run.open(tmp_path / "run") as run:
        table = run.states()
        assert table is not None
        assert {c.kind for c in table.components} == {STATE, KEYS, VALUES}
        assert (
            len(table.measurements)
            == len(run.measurements(STATES))
            == len(again.measurements)
        )


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    study = Study("reference:mamba", folder=tmp_path / "run")
    settings = {"states": True, "windows": 1, "window_length": 16}
    with pytest.raises(KLLensError, match="no format 'int7' for state; there are"):
        study.do(study.settings("measure", formats="int7", **settings))
    with pytest.raises(
        KLLensError, match="no format 'q8_0' for state"
    ):  # it has no attention
        study.do(study.settings("measure", formats="q8_0", **settings))
    with pytest.raises(KLLensError, match="leave out the limit"):
        study.do(study.settings("measure", max_bytes="3MB", **settings))
