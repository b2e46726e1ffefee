"""In order: later components make up for what the quantized part before them lost, and nothing of it stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kl_lens.calibration import gather, gather_in_order, in_order
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import FormatError, RunError, UnlearntError
from kl_lens.recipes import Recipe, fitting_recipe
from kl_lens.sensitivity.perturbation import Perturbation, replacements, swapped
from tests.calibration.test_gathering import _opened, _windows

FAMILIES = ("mamba", "mamba2", "llama", "falcon_h1", "jamba_experts")


def _plan(model: LoadedModel, method: str) -> dict[str, Recipe]:
    return {c.name: fitting_recipe(Recipe("int4", method), c.shape)[0] for c in model.anatomy.candidates}


def _loss(model: LoadedModel, plan: dict[str, Recipe], ids: torch.Tensor) -> float:
    original = model.chain.full_logits(ids).log_softmax(-1)
    with swapped(replacements(model, Perturbation(plan))):
        student = model.chain.full_logits(ids).log_softmax(-1)
    return float((original.exp() * (original - student)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_in_order_loses_less_on_the_text_it_learnt_from_and_the_model_stays(
    family: str, tmp_path: Path
) -> None:
    model, windows = _opened(family), _windows(12)
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    plain = gather(model, windows, tmp_path)
    model.weights.learn_from(plain)
    usual = _loss(model, _plan(model, "gptq"), windows.ids)
    blocks: list[int] = []
    plan = _plan(model, "ordered")
    found = gather_in_order(
        model, windows, tmp_path, plain, plan, progress=lambda done, _: blocks.append(done)
    )
    assert blocks == list(range(1, len(model.chain) + 1))
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())
    assert found.digest != plain.digest
    assert _loss(model, plan, windows.ids) < usual
    corrected = {c.name for c in model.anatomy.candidates if found.of(c.name).correction is not None}
    stacked = {c.name for c in model.anatomy.candidates if len(c.shape) == 3}
    assert corrected
    assert not corrected & stacked
    assert set(found.notes) >= stacked  # never silently


def test_an_interrupted_gathering_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, windows = _opened("mamba"), _windows(4)
    plan = _plan(model, "ordered")
    plain = gather(model, windows, tmp_path)
    model.weights.learn_from(plain)
    whole = gather_in_order(model, windows, tmp_path, plain, plan)
    digests = model.weights.digests(plan)
    original = model.model.get_parameter("backbone.layers.0.mixer.in_proj.weight").clone()

    def stop(done: int, blocks: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather_in_order(model, windows, tmp_path / "again", plain, plan, progress=stop)
    assert torch.equal(model.model.get_parameter("backbone.layers.0.mixer.in_proj.weight"), original)
    learnt: list[str] = []
    really = in_order._Ordering._learn
    monkeypatch.setattr(
        in_order._Ordering, "_learn",
        lambda self, component, *rest: (learnt.append(component.name), really(self, component, *rest)),
    )  # fmt: skip
    resumed = gather_in_order(model, windows, tmp_path / "again", plain, plan)
    assert learnt
    assert not any("layers.0." in name for name in learnt)
    assert resumed.digest == whole.digest
    assert model.weights.digests(plan) == digests


def test_finds_outputs_that_are_added_directly(tmp_path: Path, monkeypatch) -> None:
    seen: dict[str, float | None] = {}
    really = in_order._Ordering._added_straight

    def noted(self, component, *rest):  # type: ignore[no-untyped-def]
        seen[component.name] = really(self, component, *rest)
        return seen[component.name]

    monkeypatch.setattr(in_order._Ordering, "_added_straight", noted)
    model, windows = _opened("llama"), _windows(4)
    plain = gather(model, windows, tmp_path)
    gather_in_order(model, windows, tmp_path, plain, _plan(model, "ordered"))
    straight = {name.rpartition(".")[2] for name, factor in seen.items() if factor is not None}
    assert straight == {"down_proj"}  # behind o_proj the feed-forward part reads what it gave
    assert all(factor == pytest.approx(1, rel=1e-3) for factor in seen.values() if factor is not None)


def test_ordered_recipes_need_the_statistics_of_their_plan(tmp_path: Path) -> None:
    model, windows = _opened("mamba"), _windows(4)
    with pytest.raises(UnlearntError, match="kl-lens calibrate --run DIR --in-order PLAN"):
        model.weights.learnt_by([Recipe("int4", "ordered")])
    plain = gather(model, windows, tmp_path)
    plan = _plan(model, "ordered")
    found = gather_in_order(model, windows, tmp_path, plain, plan)
    with pytest.raises(FormatError, match=f"but the run has {found.digest}"):
        model.weights.learnt_by([Recipe("int4", "ordered")], expected="0123")
    other = plan | {model.anatomy.head: Recipe("int8")}
    with pytest.raises(RunError, match="another plan"):
        gather_in_order(model, windows, tmp_path, plain, other)
