"""Whole plans against computations by hand, in float64, on the model's own forward."""

import math

import pytest
import torch

from kl_lens.base.errors import RunError
from kl_lens.measuring.joint import PlanMeter
from kl_lens.measuring.perturbation import Perturbation, replacements, swapped
from kl_lens.model import LoadedModel
from kl_lens.weights.recipes import Recipe
from tests.measuring.conftest import loaded, some_windows

WINDOWS = some_windows(3, 24)


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return loaded("falcon_h1")


@pytest.fixture(scope="module")
def names(hybrid: LoadedModel) -> list[str]:
    return [component.name for component in hybrid.anatomy.candidates]


def log_probabilities(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(WINDOWS.ids).logits.double().log_softmax(-1)


@pytest.mark.parametrize("memory", [10**9, 1000], ids=["roomy", "a window at a time"])
def test_a_plan_loses_what_is_computed_by_hand(
    hybrid: LoadedModel, names: list[str], memory: int
) -> None:
    recipes = {names[1]: Recipe("int4"), names[-1]: Recipe("int8")}
    original = log_probabilities(hybrid)
    with swapped(replacements(hybrid, Perturbation(recipes))):
        planned = log_probabilities(hybrid)
    kl = (original.exp() * (original - planned)).sum(-1).mean(1)
    following = WINDOWS.ids[:, 1:, None]
    losses = [-p[:, :-1].gather(2, following).mean((1, 2)) for p in (original, planned)]
    change = losses[1] - losses[0]

    result = PlanMeter(hybrid, WINDOWS, memory).measure(recipes | {names[2]: "fp16"})
    assert result.windows == pytest.approx(kl.numpy(), rel=1e-3)
    assert result.kl.value == pytest.approx(float(kl.mean()), rel=1e-3)
    assert result.kl.standard_error == pytest.approx(
        float(kl.std()) / math.sqrt(3), rel=1e-3
    )
    assert result.delta_cross_entropy.value == pytest.approx(
        float(change.mean()), abs=1e-6
    )
    perplexities = [math.exp(loss.mean()) for loss in losses]
    assert result.original_perplexity == pytest.approx(perplexities[0], rel=1e-5)
    assert result.perplexity.value == pytest.approx(perplexities[1], rel=1e-5)
    error = perplexities[1] * float(change.std()) / math.sqrt(3)
    assert result.perplexity.standard_error == pytest.approx(error, rel=1e-3)


def test_a_plan_is_measured_once_and_fp16_is_no_part_of_it(
    hybrid: LoadedModel, names: list[str]
) -> None:
    meter = PlanMeter(hybrid, WINDOWS)
    nothing = meter.measure({names[2]: "fp16"}, {"keys": "fp16"})
    assert nothing.kl.value < 1e-9
    first = meter.measure({names[1]: "int8"})
    again = meter.measure({names[2]: "fp16", names[1]: "int8"}, {"values": "fp16"})
    assert again is first
    keys = meter.measure({names[1]: "int8"}, {"keys": "int4", "values": "fp16"})
    assert keys.kl.value > 2 * first.kl.value
    caches = meter.measure({}, {"keys": "int4"})
    assert 0 < caches.kl.value != keys.kl.value
    # What a search learns from: plans of weights alone.
    assert meter.known == [({names[1]: Recipe("int8")}, first)]
    assert meter.perplexity({names[1]: "int8"}) == first.perplexity.value


def test_a_plan_that_gives_no_numbers_is_refused(
    hybrid: LoadedModel, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dequantize = type(Recipe("int8").grid).dequantize
    monkeypatch.setattr(
        type(Recipe("int8").grid),
        "dequantize",
        lambda grid, quantized: dequantize(grid, quantized) * math.nan,
    )
    with pytest.raises(RunError, match="this plan: the logits on window 0 are NaN"):
        PlanMeter(hybrid, WINDOWS).measure({names[1]: "int8"})
