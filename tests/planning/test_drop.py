"""The smallest plan within a measured loss, against a world whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from kl_lens.base.errors import BudgetError
from kl_lens.planning import plan_for_budget, plan_for_loss
from kl_lens.run.records import SensitivityTable
from tests.planning.tables import component, table_of


def world() -> SensitivityTable:
    kls = {
        (f"c{i}", fmt): 0.001 * 1.5**i * factor
        for i in range(12)
        for fmt, factor in (("int4", 1.0), ("int8", 0.01))
    }
    return table_of([component(f"c{i}") for i in range(12)], kls, head="c0")


class Truth:
    """A loss `exaggeration` times as large as KL predicts."""

    def __init__(self, table: SensitivityTable, exaggeration: float) -> None:
        self.kl = {
            (m.component, m.format): m.metrics["kl_teacher_to_student"].value for m in table.measurements
        }
        self.exaggeration = exaggeration
        self.asked = 0

    def __call__(self, assignment: Mapping[str, str]) -> float:
        self.asked += 1
        total = sum(self.kl.get(item, 0.0) for item in assignment.items())
        return self.exaggeration * total


@pytest.mark.parametrize("exaggeration", [0.5, 1.0, 1.3, 3.0])
def test_the_plan_fits_and_is_nearly_the_smallest(exaggeration: float) -> None:
    table = world()
    truth = Truth(table, exaggeration)
    result = plan_for_loss(table, truth, max_loss=0.05, evaluations=8)
    assert result.loss <= 0.05
    assert truth(result.plan.assignment) == result.loss
    best = plan_for_budget(table, max_kl=0.05 / exaggeration).plan
    assert best.bytes is not None
    assert result.plan.bytes is not None
    assert best.bytes <= result.plan.bytes <= 1.1 * best.bytes
    assert result.evaluations <= 8


def test_the_plan_says_how_it_was_found() -> None:
    table = world()
    plan = plan_for_loss(table, Truth(table, 1.0), max_loss=0.03, name="mine").plan
    assert plan.name == "mine"
    assert plan.limits == {"loss": 0.03}
    assert plan.family == "exact"
    assert "measuring whole plans" in plan.made_by


def test_a_loss_that_no_plan_meets_is_reported() -> None:
    with pytest.raises(BudgetError, match=r"the closest lost 0\.7"):
        plan_for_loss(world(), lambda assignment: 0.7, max_loss=0.01)


def test_nothing_may_be_lost_means_fp16() -> None:
    with pytest.raises(BudgetError, match="FP16"):
        plan_for_loss(world(), lambda assignment: 0.0, max_loss=0.0)


def test_a_loss_of_nan_is_reported() -> None:
    with pytest.raises(BudgetError, match="is nan; use more held-out text"):
        plan_for_loss(world(), lambda assignment: math.nan, max_loss=0.01)
