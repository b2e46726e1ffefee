"""Predictions of what candidates lose."""

import pytest

from kl_lens.measuring.perturbation import Candidate, key_of
from kl_lens.measuring.screening import ALIKE, Screen, deciding, is_worth_it
from kl_lens.run.records import Component
from kl_lens.weights.recipes import Recipe

ERRORS = {"q4_k": 16.0, "q5_k": 4.0, "q6_k": 1.0, "q8_0": 0.1}
MENU = [
    Recipe("q4_k", "gptq"),
    Recipe("q5_k", "gptq"),
    Recipe("q6_k", "gptq"),
    Recipe("q8_0"),
]


def component(index: int, kind: str) -> Component:
    name = f"layers.{index}.{kind}"
    return Component(name, f"{name}.weight", kind, "ssm", index, (256, 256), 256 * 256)


@pytest.fixture
def candidates() -> list[Candidate]:
    return [
        Candidate(component(i, kind), r)
        for i in range(5)
        for kind in ("in_proj", "out_proj")
        for r in MENU
    ]


def error(candidate: Candidate) -> float:
    better = 0.5 if candidate.recipe.method == "gptq" else 1.0
    return (
        better
        * ERRORS[candidate.recipe.grid.name]
        * (1 + (candidate.component.block or 0))
    )


def kl(candidate: Candidate) -> float:
    """A sensitivity of each component times its error."""
    return 1e-4 * (3 + (candidate.component.block or 0)) ** 2 * error(candidate)


def test_predictions_follow_errors(candidates: list[Candidate]) -> None:
    screen = Screen(candidates)
    assert len(screen.first) == 10  # one anchor each
    assert {c.recipe.method for c in screen.first} == {"imatrix"}
    errors = {key_of(c): error(c) for c in screen.needed}
    first = {key_of(c): kl(c) for c in screen.first}
    predicted = screen.predicted(errors, first, {})
    assert predicted == pytest.approx({key_of(c): kl(c) for c in candidates})
    measured = {key_of(c): kl(c) for c in candidates if c.recipe.grid.name == "q8_0"}
    assert screen.predicted(
        errors, screen.first_from(errors, measured), measured
    ) == pytest.approx(predicted)


def test_what_was_measured_corrects_its_component_and_its_kind(
    candidates: list[Candidate],
) -> None:
    screen = Screen(candidates)
    errors = {key_of(c): error(c) for c in screen.needed}
    first = {key_of(c): kl(c) for c in screen.first}

    def truth(candidate: Candidate) -> float:
        """Activations add to q6_k in `out_proj`, and one component is more sensitive than its anchor says."""
        name, recipe = key_of(candidate)
        rounded = (
            3.0
            if recipe.grid.name == "q6_k" and candidate.component.kind == "out_proj"
            else 1.0
        )
        return kl(candidate) * rounded * (2.0 if name == "layers.1.out_proj" else 1.0)

    sample = [
        c
        for c in candidates
        if c.recipe.grid.name in ("q5_k", "q6_k") and c.component.block != 4
    ]
    predicted = screen.predicted(errors, first, {key_of(c): truth(c) for c in sample})
    assert predicted == pytest.approx({key_of(c): truth(c) for c in candidates})


def test_a_sample_corrects_recipes_of_which_nothing_was_measured(
    candidates: list[Candidate],
) -> None:
    screen = Screen(candidates)
    errors = {key_of(c): error(c) for c in screen.needed}
    first = {key_of(c): kl(c) for c in screen.first}
    truth = {
        key_of(c): kl(c) * (3.0 if c.recipe.grid.name == "q8_0" else 1.0)
        for c in candidates
    }
    measured = {key: kl for key, kl in truth.items() if key[1].grid.name != "q8_0"}
    samples = screen.samples(measured)
    assert [c.component.name for c in samples] == [
        "layers.2.in_proj",
        "layers.2.out_proj",
    ]
    predicted = screen.predicted(
        errors, first, measured, {key_of(c): truth[key_of(c)] for c in samples}
    )
    assert predicted == pytest.approx(truth)


def test_only_clear_losers_of_no_fewer_bytes_are_left_out(
    candidates: list[Candidate],
) -> None:
    menu = [*candidates, Candidate(candidates[0].component, Recipe("q4_k"))]
    errors = {key_of(c): error(c) for c in menu}
    assert Screen(menu).undominated(errors) == candidates
    near = errors | {key_of(menu[-1]): 1.1 * errors[key_of(menu[0])]}
    assert Screen(menu).undominated(near) == menu


def test_in_a_deep_model_some_components_stand_for_others_of_their_kind() -> None:
    deep = [
        Candidate(component(i, kind), r)
        for i in range(20)
        for kind in ("in", "out")
        for r in MENU
    ]
    screen = Screen(deep)
    assert len(screen.needed) == 2 * (ALIKE * len(MENU) + 20)  # and every anchor
    errors = screen.completed({key_of(c): error(c) for c in screen.needed})
    assert errors == pytest.approx({key_of(c): error(c) for c in (*deep, *screen.first)})


@pytest.mark.parametrize(
    ("count", "middle"), [(4, "q5_k"), (3, "q5_k"), (2, "q4_k"), (1, "q4_k")]
)
def test_the_anchor_is_the_middle_of_the_formats(count: int, middle: str) -> None:
    menu = [Candidate(component(0, "in_proj"), recipe) for recipe in MENU[:count]]
    assert [anchor.recipe.grid.name for anchor in Screen(menu).first] == [middle]
    assert Screen(menu[::-1]).first == Screen(menu).first


def test_a_menu_is_predicted_if_it_is_large_and_has_methods_or_a_limit() -> None:
    menu = [Candidate(component(0, "in_proj"), recipe) for recipe in MENU]
    other_method = Candidate(component(0, "in_proj"), Recipe("q4_k"))
    assert is_worth_it(menu, with_a_limit=True)
    assert not is_worth_it(menu, with_a_limit=False)
    assert is_worth_it([*menu, other_method], with_a_limit=False)
    three = [*menu[:2], other_method]
    assert not is_worth_it(three, with_a_limit=True)
    assert is_worth_it(three, with_a_limit=True, gradients=True)
    assert not is_worth_it(menu[:2], with_a_limit=True, gradients=True)


def test_a_plans_largest_damages_decide_until_three_percent_are_left() -> None:
    menu = [Recipe("q4_k"), Recipe("q5_k"), Recipe("q6_k"), Recipe("q8_0")]
    choices = {
        ("a", recipe): kl
        for recipe, kl in zip(menu, (0.5, 0.41, 0.07, 0.02), strict=True)
    }
    assert deciding(choices) == [("a", menu[2]), ("a", menu[1]), ("a", menu[0])]
    assert deciding({}) == []
