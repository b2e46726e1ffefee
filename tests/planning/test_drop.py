"""The smallest plan within a measured rise of perplexity, against a world whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from kl_lens.errors import BudgetError
from kl_lens.planning import plan_for_budget, plan_for_drop
from kl_lens.records import SensitivityTable
from tests.planning.tables import component, table_of

ORIGINAL = 20.0


def world() -> SensitivityTable:
    kls = {
        (f"c{i}", fmt): 0.001 * 1.5**i * factor
        for i in range(12)
        for fmt, factor in (("int4", 1.0), ("int8", 0.01))
    }
    return table_of([component(f"c{i}") for i in range(12)], kls, head="c0")


class Truth:
    """Perplexity that rises `exaggeration` times as much as KL predicts."""

    def __init__(self, table: SensitivityTable, exaggeration: float) -> None:
        self.kl = {
            (m.component, m.format): m.metrics["kl_teacher_to_student"].value for m in table.measurements
        }
        self.exaggeration = exaggeration
        self.asked = 0

    def __call__(self, assignment: Mapping[str, str]) -> float:
        self.asked += 1
        total = sum(self.kl.get(item, 0.0) for item in assignment.items())
        return ORIGINAL * math.exp(self.exaggeration * total)


@pytest.mark.parametrize("exaggeration", [0.5, 1.0, 1.3, 3.0])
def test_the_plan_fits_and_is_nearly_the_smallest(exaggeration: float) -> None:
    table = world()
    truth = Truth(table, exaggeration)
    result = plan_for_drop(table, truth, max_drop=0.05, evaluations=8)
    assert result.perplexity <= 1.05 * ORIGINAL
    assert truth(result.plan.assignment) == result.perplexity
    best = plan_for_budget(table, max_kl=math.log(1.05) / exaggeration).plan
    assert best.bytes is not None
    assert result.plan.bytes is not None
    assert best.bytes <= result.plan.bytes <= 1.1 * best.bytes
    assert result.evaluations <= 8


def test_the_plan_says_how_it_was_found() -> None:
    table = world()
    plan = plan_for_drop(table, Truth(table, 1.0), max_drop=0.03, name="mine").plan
    assert plan.name == "mine"
    assert plan.limits["drop"] == 0.03
    assert plan.family == "exact"
    assert "measured perplexity" in plan.made_by


def test_a_drop_that_nothing_meets_is_said() -> None:
    table = world()

    def hopeless(assignment: Mapping[str, str]) -> float:
        return ORIGINAL * (2.0 if assignment else 1.0)

    with pytest.raises(BudgetError, match="closest rose by 100"):
        plan_for_drop(table, hopeless, max_drop=0.01)


def test_nothing_may_be_lost_means_fp16() -> None:
    with pytest.raises(BudgetError, match="FP16"):
        plan_for_drop(world(), lambda assignment: ORIGINAL, max_drop=0.0)


def test_a_perplexity_that_is_no_number_is_said() -> None:
    with pytest.raises(BudgetError, match="came out as nan; measure on more held-out text"):
        plan_for_drop(world(), lambda assignment: math.nan if assignment else ORIGINAL, max_drop=0.01)
