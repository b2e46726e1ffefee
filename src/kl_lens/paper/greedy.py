"""The paper's greedy rule: quantize from least to most sensitive while perplexity stays within a budget.

A plan is within the budget if its perplexity is at most γ times that of the FP16 model. Entries are (component, format)
pairs sorted from least to most sensitive, one list or the merged 4-bit and 8-bit lists. Accepting an entry gives its
component that format; an entry that would not make its component smaller is skipped without an evaluation.

`exhaustive` is the paper's algorithm: one evaluation per entry. The default first finds the longest acceptable head of
the list by binary search and then tries the rest one by one. The search assumes that a longer head is never better than
a shorter one. If that is false it may stop early, but its result was measured and is within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kl_lens.base.errors import PlanError
from kl_lens.paper.points import (
    PUBLISHED_METRIC,
    Entry,
    excluded_components,
    label,
    paper_formats,
    ranked,
)
from kl_lens.planning.predict import component_bytes, finished_plan, stored_recipe
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.weights.recipes import FP16, Recipe

# Perplexity under an assignment; the empty assignment is the FP16 model.
Evaluate = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class GreedyResult:
    plan: Plan
    baseline: float
    perplexity: float  # of the plan
    evaluations: int  # including the baseline


def greedy_plan(
    table: SensitivityTable,
    evaluate: Evaluate,
    *,
    gamma: float = 1.10,
    exhaustive: bool = False,
    formats: Sequence[str] | None = None,
    metric: str = PUBLISHED_METRIC,
    no_head: bool = False,
    name: str | None = None,
) -> GreedyResult:
    """Accepts entries while the measured perplexity stays within γ × the FP16 baseline.

    `formats`: default int4 and int8 or, if those were measured, q4_0 and q8_0.
    """
    if not gamma >= 1:
        raise PlanError(f"--gamma {gamma:g} demands better than FP16; give 1 or more, such as 1.10")
    exclude = excluded_components(table, no_head=no_head)
    formats, prefix = (formats, "") if formats else paper_formats(table)
    order = ranked(table, [Recipe.parse(f) for f in formats], metric, exclude)
    components = {c.name: c for c in table.candidates}
    known: dict[frozenset[tuple[str, str]], float] = {}  # each assignment is evaluated once

    def perplexity(assignment: Mapping[str, str]) -> float:
        key = frozenset(assignment.items())
        if key not in known:
            known[key] = float(evaluate(dict(assignment)))
        return known[key]

    def with_entry(assignment: dict[str, Recipe], entry: Entry) -> dict[str, Recipe]:
        """The same assignment if the entry would not make its component smaller."""
        component = components[entry.component]
        recipe = stored_recipe(component, entry.recipe)[0]
        current = assignment.get(entry.component, FP16)
        saves = component_bytes(component, recipe) < component_bytes(component, current)
        return assignment | {entry.component: recipe} if saves else assignment

    def with_head(length: int) -> dict[str, Recipe]:
        assignment: dict[str, Recipe] = {}
        for entry in order[:length]:
            assignment = with_entry(assignment, entry)
        return assignment

    baseline = perplexity({})
    if not (math.isfinite(baseline) and baseline > 0):
        raise PlanError(f"the FP16 model's perplexity is {baseline}; check the text and the checkpoint")
    limit = gamma * baseline
    # A head of `low` entries is acceptable; longer than `high` is assumed not to be.
    low, high = 0, 0 if exhaustive else len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if perplexity(with_head(middle)) <= limit:  # False for nan
            low = middle
        else:
            high = middle - 1
    assignment = with_head(low)
    for entry in order[low:]:
        longer = with_entry(assignment, entry)
        if longer != assignment and perplexity(longer) <= limit:
            assignment = longer
    notes = {
        "gamma": gamma,
        "deciding_perplexity": perplexity(assignment),
        "deciding_perplexity_of_the_original": baseline,
        "evaluations": len(known),
        "exhaustive": exhaustive,
        "metric": metric,
    }
    plan = finished_plan(
        table,
        name or f"{prefix}{label(metric)}_gamma{gamma:.2f}{'_exhaustive' if exhaustive else ''}",
        assignment,
        "greedy under a perplexity budget",
        notes,
        family="greedy",
    )
    return GreedyResult(plan, baseline, perplexity(assignment), len(known))
