"""Never worse at no more bytes: who is recommended, on windows whose answer is plain."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kl_lens.pipeline.target_planner import TargetPlanner
from kl_lens.planning import Contender, contest, interaction, paired_difference, stock_with_our_methods
from kl_lens.recipes import parsed
from kl_lens.records import Estimate, Plan
from tests.planning.tables import component, table_of

DIFFICULTY = np.array([0.5, 1.0, 1.5, 2.0])  # common to all plans, as in real text


def contender(name: str, size: int, kl: float, noise: float = 0.0) -> Contender:
    return Contender(name, size, kl * DIFFICULTY + noise * np.array([1.0, -1.0, -1.0, 1.0]))


def test_ours_wins_if_better_than_every_rival_that_is_no_larger() -> None:
    ours = contender("ours", 100, 0.010)
    rivals = [contender("small", 90, 0.02), contender("same", 100, 0.011), contender("large", 120, 0.001)]
    found = contest(ours, rivals)
    assert found.winner == "ours"
    assert set(found.beaten) == {"small", "same"}  # the large one proves nothing
    assert all(difference.better(2.0) for difference in found.beaten.values())
    assert "small and same, which are no larger" in found.sentence("ours")


def test_a_better_rival_that_is_no_larger_wins() -> None:
    rivals = [contender("good", 100, 0.008), contender("best", 95, 0.007), contender("worse", 80, 0.5)]
    found = contest(contender("ours", 100, 0.010), rivals)
    assert found.winner == "best"
    assert "best is no larger than our plan" in found.sentence("ours")


def test_an_equal_rival_that_is_no_larger_wins() -> None:
    """Lower, but within the error of the paired difference: not proven."""
    level = contender("level", 99, 0.0101, noise=0.01)
    assert contest(contender("ours", 100, 0.010), [level]).winner == "level"
    assert contest(contender("ours", 98, 0.010), [level]).winner == "ours"  # now it is larger


def test_a_winner_is_challenged_in_its_turn() -> None:
    """Two level ones, the second smaller still: the smallest of the chain is recommended."""
    chain = [contender("first", 95, 0.010, 0.01), contender("second", 90, 0.0101)]
    assert contest(contender("ours", 100, 0.010), chain).winner == "second"


def test_a_rival_beyond_the_limit_cannot_win() -> None:
    rival = contender("rival", 90, 0.0125, noise=0.01)
    assert contest(contender("ours", 100, 0.012), [rival]).winner == "rival"
    found = contest(contender("ours", 100, 0.012), [rival], keeps=lambda one: one.kl <= 0.0122)
    assert found.winner == "ours"
    assert set(found.beaten) == {"rival"}


def test_larger_rivals_are_reported() -> None:
    found = contest(contender("ours", 10, 0.01), [contender("large", 20, 0.001)])
    assert found.sentence("ours") == "all stock recipes are larger"


def test_paired_difference() -> None:
    difference = paired_difference(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 4.0, 4.0]))
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(np.std([-1, 0, -1, 0], ddof=1) / 2)
    assert difference.better(1.0)
    assert not difference.better(3.0)
    assert not paired_difference(np.array([1.0]), np.array([2.0])).better(0.1)  # one window proves nothing


def test_the_interaction_is_the_mean_factor_whatever_the_sizes() -> None:
    assert interaction([(0.001, 0.0011), (0.1, 0.11)]) == pytest.approx(1.1)
    assert interaction([(0.01, 0.02), (0.01, 0.005)]) == pytest.approx(1.0)
    assert interaction([(0.0, 0.01), (0.01, 0.0)]) == 1.0  # nothing to learn from
    assert interaction([]) == 1.0


def test_the_cost_of_other_text_comes_from_the_rival_that_loses_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(**losses: float) -> SimpleNamespace:
        return SimpleNamespace(measure=lambda plan: SimpleNamespace(kl=Estimate(losses[plan["head"]], 0.0)))

    monkeypatch.setattr(TargetPlanner, "halves", (half(q8_0=0.001, q4_k=0.04), half(q8_0=0.002, q4_k=0.05)))
    planner = TargetPlanner.__new__(TargetPlanner)
    rivals = [Plan(name, {"head": name}, name) for name in ("q8_0", "q4_k")]
    assert planner.other_text(rivals) == pytest.approx(1.25)
    assert planner.other_text([]) == 1.0


def test_a_stock_recipe_that_fits_by_its_written_size_wins_over_sums_of_bounds() -> None:
    """The solver's bounds say that all-int8 is too large; the written file says that it is not."""

    def size(model: object, plan: Plan) -> int:
        return (plan.bytes or 0) + (100 if plan.assignment["head"] == "int8" else 120)

    planner = TargetPlanner.__new__(TargetPlanner)
    planner.target = SimpleNamespace(name="toy", title="Toy", exact_file_bytes=size)  # type: ignore[assignment]
    planner.__dict__["fixed_bytes"] = 100
    planner._run = planner._settings = SimpleNamespace()  # type: ignore[assignment]
    planner._bench = SimpleNamespace(model_of=lambda run, settings: None)  # type: ignore[assignment]
    small = Plan("ours", {"head": "int4"}, "exact budget", 0.5, 500, limits={"bytes": 1100}, fixed_bytes=120)
    whole = Plan("mixture", {"head": "int8"}, "a mixture", 0.1, 1000)
    assert planner.fitted(lambda fixed: small, 1100).file_bytes == 620
    found = planner.fitted(lambda fixed: small, 1100, [whole])
    assert (found.name, found.assignment, found.file_bytes) == ("ours", {"head": "int8"}, 1100)
    assert found.limits == {"bytes": 1100}
    assert planner.fitted(lambda fixed: small, 1099, [whole]).assignment == {"head": "int4"}
    worse = replace(whole, predicted_kl=0.9)
    assert planner.fitted(lambda fixed: small, 1100, [worse]).assignment == {"head": "int4"}


def test_stock_assignments_get_our_methods_where_they_are_no_larger() -> None:
    parts = [component("head", (64, 64)), component("in_proj", (64, 64), fused_with=["k"]), component("k")]
    damage = {"int4": 0.2, "int8": 0.02, "int8+search": 0.01, "q8_0": 0.001}
    table = table_of(parts, {(c.name, recipe): kl for c in parts for recipe, kl in damage.items()})
    target: Any = SimpleNamespace(
        holds=lambda grid, shape: "not here" if grid.name == "q8_0" else None, overhead=lambda grid: 10
    )
    mixture = parsed({"head": "int8", "in_proj": "int4", "k": "int8"})
    [found] = stock_with_our_methods(table, [mixture], target=target)
    assert found == {"head": "int8+search", "in_proj": "int4", "k": "int8+search"}
    assert stock_with_our_methods(table, [mixture], target=target, recipes=["int8"]) == []
