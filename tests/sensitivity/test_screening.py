"""Predictions of what candidates lose."""

from __future__ import annotations

import pytest

from kl_lens.recipes import Recipe
from kl_lens.records import Component
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.pieces import key_of
from kl_lens.sensitivity.screening import Screen, is_worth_it

ERRORS = {"q4_k": 16.0, "q5_k": 4.0, "q6_k": 1.0, "q8_0": 0.1}
MENU = [Recipe("q4_k", "gptq"), Recipe("q5_k", "gptq"), Recipe("q6_k", "gptq"), Recipe("q8_0")]


def component(index: int, kind: str) -> Component:
    name = f"layers.{index}.{kind}"
    return Component(name, f"{name}.weight", kind, "ssm", index, (256, 256), 256 * 256)


@pytest.fixture
def candidates() -> list[Candidate]:
    return [
        Candidate(component(i, kind), r) for i in range(5) for kind in ("in_proj", "out_proj") for r in MENU
    ]


def error(candidate: Candidate) -> float:
    better = 0.5 if candidate.recipe.method == "gptq" else 1.0
    return better * ERRORS[candidate.recipe.grid.name] * (1 + (candidate.component.block or 0))


def kl(candidate: Candidate) -> float:
    """A sensitivity of each component times its error and that of its activations."""
    block, kind = candidate.component.block or 0, candidate.component.kind
    activations = (
        {"in_proj": 0.0, "out_proj": 0.3}[kind] * (1 + block) * (candidate.recipe.grid.name != "q4_k")
    )
    return 1e-4 * (3 + block) ** 2 * (error(candidate) + activations)


def test_predictions_follow_errors_and_rounded_activations(candidates: list[Candidate]) -> None:
    screen = Screen(candidates)
    assert len(screen.first) == 10 + 2 * 3  # one anchor each, and two pilots in all formats
    assert not any(c.recipe.quantizer.learns for c in screen.first)
    errors = {key_of(c): error(c) for c in screen.needed}
    first = {key_of(c): kl(c) for c in screen.first}
    predicted = screen.predicted(errors, first, {})
    assert predicted == pytest.approx({key_of(c): kl(c) for c in candidates})


def test_formats_that_need_importance_are_screened_with_it(candidates: list[Candidate]) -> None:
    small = [Candidate(c.component, Recipe("iq2_xxs", "gptq")) for c in candidates if c.recipe == MENU[0]]
    assert {c.recipe for c in Screen([*small, *candidates]).first} == {
        Recipe("iq2_xxs", "imatrix"),
        *map(Recipe, ERRORS),
    }


def test_what_was_measured_counts_and_corrects_its_component(candidates: list[Candidate]) -> None:
    screen = Screen(candidates)
    errors = {key_of(c): error(c) for c in screen.needed}
    first = {key_of(c): kl(c) for c in screen.first}
    some = candidates[0]
    predicted = screen.predicted(errors, first, {key_of(some): 3 * kl(some)})
    assert predicted[key_of(some)] == 3 * kl(some)
    assert predicted[key_of(candidates[1])] == pytest.approx(3 * kl(candidates[1]))


def test_only_clear_losers_of_no_fewer_bytes_are_left_out(candidates: list[Candidate]) -> None:
    both = [*candidates, Candidate(candidates[0].component, Recipe("q4_k"))]
    errors = {key_of(c): error(c) for c in both}
    assert Screen(both).undominated(errors) == candidates
    near = errors | {key_of(both[-1]): 1.1 * errors[key_of(both[0])]}
    assert Screen(both).undominated(near) == both


def test_small_menus_are_not_screened(candidates: list[Candidate]) -> None:
    small = [c for c in candidates if c.recipe.grid.name != "q8_0"]
    assert not is_worth_it(small, with_a_limit=True)
    assert is_worth_it(candidates, with_a_limit=True)
    assert not is_worth_it(candidates, with_a_limit=False)  # one recipe per format: none can lose to another
