"""Never worse at no more bytes: who is recommended, on windows whose answer is plain."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kl_lens.planning import (
    Contender,
    build_problem,
    contest,
    paired_difference,
    stock_with_our_methods,
)
from kl_lens.weights.recipes import parsed
from tests.planning.tables import component, table_of

DIFFICULTY = np.array([0.5, 1.0, 1.5, 2.0])  # common to all plans, as in real text


def contender(name: str, size: int, kl: float, noise: float = 0.0) -> Contender:
    return Contender(
        name, size, kl * DIFFICULTY + noise * np.array([1.0, -1.0, -1.0, 1.0])
    )


def test_ours_stays_if_better_than_every_rival_that_is_no_larger() -> None:
    ours = contender("ours", 100, 0.010)
    rivals = [
        contender("small", 90, 0.03),
        contender("same", 100, 0.015),
        contender("large", 120, 0.001),
    ]
    found = contest(ours, rivals)
    assert (found.winner, found.worse) == (
        "ours",
        ("small", "same"),
    )  # the large one proves nothing
    assert "lower KL than small and same, which are no larger" in found.sentence()
    assert contest(ours, rivals[2:]).sentence() == "all stock recipes are larger"
    assert (
        contest(ours, rivals[2:]).sentence(same="twin") == "our plan is the same as twin"
    )


def test_the_best_rival_that_is_no_larger_and_not_worse_wins() -> None:
    rivals = [
        contender("good", 100, 0.008),
        contender("best", 95, 0.007),
        contender("worse", 80, 0.5),
    ]
    found = contest(contender("ours", 100, 0.010), rivals)
    assert found.winner == "best"
    assert "best is no larger than our plan" in found.sentence()
    level = contender(
        "level", 99, 0.0101, noise=0.0001
    )  # higher, but within the error, and that is small
    assert contest(contender("ours", 100, 0.010), [level]).winner == "level"
    assert (
        contest(contender("ours", 98, 0.010), [level]).winner == "ours"
    )  # now it is larger


def test_what_could_be_anything_decides_nothing() -> None:
    """The error hides whether the rival is better or worse, or there is no error at all."""
    unclear = contender("unclear", 90, 0.0101, noise=0.01)
    ours = contender("ours", 100, 0.010)
    found = contest(ours, [unclear])
    assert (found.winner, found.unknown) == ("ours", ("unclear",))
    assert "4 windows are too short a text to tell whether unclear" in found.sentence()
    one = [Contender(each.name, each.bytes, each.windows[:1]) for each in (ours, unclear)]
    assert "1 window is too short a text to tell" in contest(one[0], one[1:]).sentence()
    broken = Contender("broken", 90, np.full(4, np.nan))
    assert contest(ours, [broken]).unknown == ("broken",)
    assert contest(broken, [ours]).winner == "broken"


def test_a_rival_beyond_the_limit_cannot_win() -> None:
    rival = contender("rival", 90, 0.0121, noise=0.0001)
    assert contest(contender("ours", 100, 0.012), [rival]).winner == "rival"
    found = contest(
        contender("ours", 100, 0.012), [rival], keeps=lambda one: one.kl <= 0.0122
    )
    assert (found.winner, found.beyond) == ("ours", ("rival",))
    assert "rival is as good and no larger, but not within the limit" in found.sentence()


def test_paired_difference() -> None:
    difference = paired_difference(
        np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 4.0, 4.0])
    )
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(np.std([-1, 0, -1, 0], ddof=1) / 2)
    test = stats.ttest_1samp([-1, 0, -1, 0], 0).confidence_interval()
    assert difference.interval == pytest.approx((test.low, test.high))
    assert paired_difference(np.array([1.0]), np.array([2.0])).interval == (
        -np.inf,
        np.inf,
    )


def test_stock_assignments_get_our_methods_where_they_are_no_larger() -> None:
    parts = [
        component("head", (64, 64)),
        component("in_proj", (64, 64), fused_with=["k"]),
        component("k"),
    ]
    damage = {"int4": 0.2, "int8": 0.02, "int8+search": 0.01, "q8_0": 0.001}
    table = table_of(
        parts, {(c.name, recipe): kl for c in parts for recipe, kl in damage.items()}
    )
    target: Any = SimpleNamespace(
        holds=lambda grid, shape: "not here" if grid.name == "q8_0" else None,
        keeps=lambda component: None,
        overhead=lambda grid: 10,
    )
    mixture = parsed({"head": "int8", "in_proj": "int4", "k": "int8"})
    problem = build_problem(table, target=target, keep_fused=False)
    [found] = stock_with_our_methods(problem, [mixture])
    assert found == {"head": "int8+search", "in_proj": "int4", "k": "int8+search"}
    only = build_problem(table, target=target, keep_fused=False, recipes=["int8"])
    assert stock_with_our_methods(only, [mixture]) == []
