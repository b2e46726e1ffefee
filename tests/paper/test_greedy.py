"""Greedy acceptance against models of perplexity whose right answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from kl_lens.base.errors import PlanError
from kl_lens.paper import greedy_plan
from kl_lens.run.records import SensitivityTable
from tests.planning.tables import component, table_of

BASELINE = 20.0


def chain(count: int = 12) -> SensitivityTable:
    """c0 … c11, each twice as sensitive as the one before; four bits hurt a hundred times as much as eight."""
    kls = {
        (f"c{i}", fmt): 2.0**i * factor
        for i in range(count)
        for fmt, factor in (("int4", 1.0), ("int8", 0.01))
    }
    return table_of([component(f"c{i}") for i in range(count)], kls, head="c0")


class Additive:
    """Perplexity that grows with the damage of each component; counts how often it is asked."""

    def __init__(
        self, table: SensitivityTable, scale: float, bonus: Mapping[str, float] | None = None
    ) -> None:
        kl = "kl_teacher_to_student"
        self.damage = {(m.component, m.format): m.metrics[kl].value for m in table.measurements}
        self.scale, self.bonus, self.calls = scale, bonus or {}, 0

    def __call__(self, assignment: Mapping[str, str]) -> float:
        self.calls += 1
        total = sum(self.damage[pair] + self.bonus.get(pair[0], 0.0) for pair in assignment.items())
        return BASELINE * math.exp(self.scale * total)


@pytest.mark.parametrize("gamma", [1.0, 1.05, 1.5, 100.0])
@pytest.mark.parametrize("formats", [("int8",), ("int4", "int8")])
def test_binary_search_agrees_with_one_by_one_on_additive_damage(
    gamma: float, formats: tuple[str, ...]
) -> None:
    table = chain()
    fast_model, slow_model = Additive(table, 1e-3), Additive(table, 1e-3)
    fast = greedy_plan(table, fast_model, gamma=gamma, formats=formats)
    slow = greedy_plan(table, slow_model, gamma=gamma, formats=formats, exhaustive=True)
    assert fast.plan.assignment == slow.plan.assignment
    for result, model in ((fast, fast_model), (slow, slow_model)):
        assert result.perplexity <= gamma * BASELINE
        assert result.evaluations == model.calls
        assert result.plan.notes["evaluations"] == model.calls


def test_binary_search_saves_evaluations_when_most_is_accepted() -> None:
    table = chain()
    model = Additive(table, 1e-9)
    result = greedy_plan(table, model, formats=("int8",))
    assert set(result.plan.assignment.values()) == {"int8"}
    assert result.evaluations <= 6  # the baseline and log2(12) heads
    assert greedy_plan(table, Additive(table, 1e-9), formats=("int8",), exhaustive=True).evaluations == 13


def test_a_bad_component_in_the_middle_is_passed_over() -> None:
    table = chain()
    result = greedy_plan(table, Additive(table, 1e-6, bonus={"c4": 1e6}), formats=("int8",))
    assert [n for n, f in result.plan.assignment.items() if f == "fp16"] == ["c4"]


def test_the_baseline_stays_where_it_is() -> None:
    """Each step costs 4 %: a drifting baseline would accept all of them, a fixed one stops at 10 %."""
    table = chain(6)

    def steps(assignment: Mapping[str, str]) -> float:
        return BASELINE * 1.04 ** len(assignment)

    for exhaustive in (False, True):
        result = greedy_plan(table, steps, formats=("int8",), exhaustive=exhaustive)
        assert [n for n, f in result.plan.assignment.items() if f == "int8"] == ["c0", "c1"]


def test_a_component_never_grows_again() -> None:
    """In the merged list an 8-bit entry may come after the component's 4-bit entry: noise, not a reason."""
    kls = {("c0", "int4"): 0.1, ("c0", "int8"): 0.2}
    result = greedy_plan(table_of([component("c0")], kls, head="c0"), lambda _: BASELINE)
    assert result.plan.assignment == {"c0": "int4"}
    # A perplexity that is not a number is within no budget.
    result = greedy_plan(
        chain(3), lambda a: math.nan if "c2" in a else BASELINE, formats=("int8",), gamma=10.0
    )
    assert result.plan.assignment == {"c0": "int8", "c1": "int8", "c2": "fp16"}


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--gamma 0.9 demands better than FP16"):
        greedy_plan(chain(), lambda _: BASELINE, gamma=0.9)
    with pytest.raises(PlanError, match="FP16 model's perplexity is inf"):
        greedy_plan(chain(), lambda _: math.inf)
