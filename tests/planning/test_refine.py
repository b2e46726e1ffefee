"""Refinement on models of interaction whose best plan is known by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_lens.errors import PlanError
from kl_lens.planning import Problem, build_problem, paired_difference, plan_for_budget, refine
from kl_lens.records import SensitivityTable
from tests.planning.tables import component, table_of

NAMES = tuple(f"c{i}" for i in range(6))
WINDOWS = 64


def table(kls: dict[tuple[str, str], float] | None = None) -> SensitivityTable:
    if kls is None:
        kls = {(n, f): (i + 1) * k for i, n in enumerate(NAMES) for f, k in (("int4", 0.1), ("int8", 0.004))}
    return table_of([component(n) for n in NAMES], kls, head="c0")


class Interacting:
    """True KL: single damages plus a cost for each pair that is at 4 bits together; noise common to all plans.

    A window's difficulty multiplies everything, as in real text, so plans compare well only in pairs.
    """

    def __init__(
        self,
        source: SensitivityTable,
        pairs: Mapping[frozenset[str], float],
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.single = {
            (m.component, m.format): m.metrics["kl_teacher_to_student"].value for m in source.measurements
        }
        self.pairs = pairs
        self.noise = noise
        self.generator = np.random.default_rng(seed)
        self.difficulty = np.random.default_rng(1).lognormal(0, 0.5, WINDOWS)
        self.difficulty /= self.difficulty.mean()
        self.calls = 0

    def truth(self, assignment: Mapping[str, str]) -> float:
        low = {n for n, f in assignment.items() if f == "int4"}
        total = sum(self.single.get(pair, 0.0) for pair in assignment.items())
        return total + sum(cost for pair, cost in self.pairs.items() if pair <= low)

    def __call__(self, assignment: Mapping[str, str]) -> np.ndarray:
        self.calls += 1
        return self.truth(assignment) * self.difficulty + self.noise * self.generator.normal(size=WINDOWS)


def best_by_brute_force(problem: Problem, model: Interacting, budget: int) -> float:
    ranges = [range(len(g.choices)) for g in problem.groups]
    return min(
        model.truth(problem.assignment(s))
        for s in itertools.product(*ranges)
        if problem.totals(s).bytes <= budget
    )


def test_it_finds_the_best_plan_that_prediction_cannot_see() -> None:
    source = table()
    problem = build_problem(source)
    size = problem.totals(
        problem.selection(dict.fromkeys(NAMES, "int4") | {"c4": "int8", "c5": "int8"})
    ).bytes
    start = plan_for_budget(source, max_bytes=size).plan
    assert [n for n, f in start.assignment.items() if f == "int4"] == ["c0", "c1", "c2", "c3"]
    model = Interacting(source, {frozenset({"c0", "c1"}): 2.0})
    result = refine(problem, start.assignment, model, max_evaluations=500)
    assert result.exhausted
    assert result.bytes <= size
    assert model.truth(result.assignment) == pytest.approx(best_by_brute_force(problem, model, size))
    assert result.kl_after == pytest.approx(model.truth(result.assignment))
    assert result.gain.mean == pytest.approx(result.kl_after - result.kl_before)
    assert result.gain.mean < -1.0
    assert result.evaluations == model.calls == len(result.history) + 1
    accepted = [t for t in result.history if t.accepted]
    assert accepted
    assert all(t.difference.mean < -2 * t.difference.standard_error for t in accepted)


def test_with_additive_damage_the_exact_plan_stays() -> None:
    source = table()
    problem = build_problem(source)
    plan = plan_for_budget(source, max_bytes=30_000).plan
    result = refine(problem, plan.assignment, Interacting(source, {}), max_bytes=30_000)
    assert result.assignment == plan.assignment
    assert result.exhausted
    assert not any(t.accepted for t in result.history)
    assert (result.gain.mean, result.reverted) == (0.0, False)


def test_room_in_the_budget_is_used_for_single_upgrades() -> None:
    source = table()
    problem = build_problem(source)
    small = dict.fromkeys(NAMES, "int4")
    room = problem.totals(problem.selection(small | {"c5": "int8"})).bytes
    result = refine(problem, small, Interacting(source, {}), max_bytes=room)
    assert result.assignment == small | {"c5": "int8"}
    assert result.history[0].changes == (("c5", "int4", "int8"),)  # the largest predicted gain comes first
    assert result.history[0].predicted_gain == pytest.approx(0.6 - 0.024)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.0, 3.0))
def test_never_over_budget_and_never_measured_worse(seed: int, noise: float) -> None:
    generator = np.random.default_rng(seed)
    source = table({(n, f): float(generator.lognormal(-3, 1)) for n in NAMES for f in ("int4", "int8")})
    pairs = {frozenset(p): float(generator.normal(0, 0.05)) for p in itertools.combinations(NAMES, 2)}
    problem = build_problem(source)
    plan = plan_for_budget(source, max_bytes=25_000).plan
    model = Interacting(source, pairs, noise * 0.01, seed)
    result = refine(problem, plan.assignment, model, max_evaluations=40)
    assert result.evaluations <= 40
    assert result.bytes <= plan.bytes
    assert result.kl_after <= result.kl_before
    assert problem.totals(problem.selection(result.assignment)).bytes == result.bytes


def test_pure_noise_is_not_taken_for_a_gain() -> None:
    """Windows that are all noise: at six standard errors nothing passes, however many are tried."""
    source = table(dict.fromkeys(((n, f) for n in NAMES for f in ("int4", "int8")), 1e-9))
    model = Interacting(source, {}, noise=1.0, seed=5)
    problem = build_problem(source)
    start = dict.fromkeys(NAMES[:3], "int4") | dict.fromkeys(NAMES[3:], "int8")
    result = refine(problem, start, model, z=6.0, max_evaluations=150)
    assert result.assignment == start


def test_a_second_text_has_the_last_word() -> None:
    source = table()
    problem = build_problem(source)
    start = dict.fromkeys(NAMES[:4], "int4") | dict.fromkeys(NAMES[4:], "int8")
    first = Interacting(source, {frozenset({"c0", "c1"}): 2.0})
    agrees = refine(problem, start, first, confirm=first)
    assert agrees.confirmed is not None
    assert agrees.confirmed.mean < 0
    assert not agrees.reverted
    contrary = refine(problem, start, first, confirm=lambda a: -first(a))
    assert contrary.reverted
    assert contrary.assignment == start
    assert contrary.kl_after == contrary.kl_before


def test_fused_groups_move_together() -> None:
    pair = [component("q", fused_with=["k"]), component("k", fused_with=["q"]), component("o")]
    kls = {(n, f): k for n in ("q", "k", "o") for f, k in (("int4", 0.1), ("int8", 0.01))}
    problem = build_problem(table_of(pair, kls, head="o"))
    seen: list[dict[str, str]] = []

    def measure(assignment: Mapping[str, str]) -> np.ndarray:
        seen.append(dict(assignment))
        return np.full(4, 1.0)

    start = {"q": "int4", "k": "int4", "o": "int8"}
    refine(problem, start, measure, max_bytes=30_000)
    assert len(seen) > 1
    assert all(a["q"] == a["k"] for a in seen)
    with pytest.raises(PlanError, match="q and k are fused by runtimes"):
        refine(problem, start | {"q": "int8"}, measure)


def test_what_cannot_be_refined_is_said() -> None:
    source = table()
    problem = build_problem(source)
    start = dict.fromkeys(NAMES, "int8")
    with pytest.raises(PlanError, match="more than the 10 B allowed"):
        refine(problem, start, lambda a: np.ones(4), max_bytes=10)
    with pytest.raises(PlanError, match="int4-g32 is not among its measured formats"):
        refine(problem, start | {"c0": "int4-g32"}, lambda a: np.ones(4))
    with pytest.raises(PlanError, match="one KL per window"):
        refine(problem, start, lambda a: np.ones((2, 2)))
    without_head = build_problem(source, exclude=["c0"])
    with pytest.raises(PlanError, match="c0: int8 asked for"):
        refine(without_head, start, lambda a: np.ones(4))


def test_paired_difference() -> None:
    difference = paired_difference(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 4.0, 4.0]))
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert not difference.better(2.0)
    assert difference.better(1.0)
    assert not paired_difference(np.array([1.0]), np.array([2.0])).better(0.1)  # one window proves nothing
