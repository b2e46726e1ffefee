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
from kl_lens.paper.lists import (
    PUBLISHED_METRIC,
    Entry,
    excluded_components,
    metric_label,
    paper_formats,
    ranked,
    sensitivity_list,
)
from kl_lens.planning.cost import component_bytes, stored_recipe
from kl_lens.planning.predict import finished_plan
from kl_lens.run.records import Component, Plan, SensitivityTable
from kl_lens.weights.recipes import FP16, Recipe

# Perplexity under an assignment; the empty assignment is the FP16 model.
Evaluate = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class GreedyResult:
    plan: Plan
    baseline: float
    limit: float  # γ × baseline
    perplexity: float  # of the plan
    evaluations: int  # including the baseline
    accepted: tuple[Entry, ...]
    rejected: tuple[Entry, ...]


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
    order = ranked([sensitivity_list(table, Recipe.parse(f), metric, exclude) for f in formats], metric)
    search = _Search({c.name: c for c in table.candidates}, order, evaluate)
    baseline = search.perplexity({})
    if not (math.isfinite(baseline) and baseline > 0):
        raise PlanError(f"the FP16 model's perplexity is {baseline}; check the text and the checkpoint")
    search.limit = gamma * baseline
    accepted, rejected = search.run(0 if exhaustive else search.longest_head())
    assignment = search.applied(accepted)
    perplexity = search.perplexity(assignment)
    notes = {
        "gamma": gamma,
        "deciding_perplexity": perplexity,
        "deciding_perplexity_of_the_original": baseline,
        "evaluations": search.evaluations,
        "exhaustive": exhaustive,
        "metric": metric,
    }
    plan = finished_plan(
        table,
        name or f"{prefix}{metric_label(metric)}_gamma{gamma:.2f}{'_exhaustive' if exhaustive else ''}",
        assignment,
        "greedy under a perplexity budget",
        notes,
        family="greedy",
    )
    return GreedyResult(
        plan, baseline, search.limit, perplexity, search.evaluations, tuple(accepted), tuple(rejected)
    )


class _Search:
    """Evaluates each assignment once, and counts evaluations."""

    def __init__(
        self, components: Mapping[str, Component], order: Sequence[Entry], evaluate: Evaluate
    ) -> None:
        self.components = components
        self.order = order
        self.evaluate = evaluate
        self.limit = math.inf
        self.evaluations = 0
        self.known: dict[frozenset[tuple[str, str]], float] = {}

    def perplexity(self, assignment: Mapping[str, str]) -> float:
        key = frozenset(assignment.items())
        if key not in self.known:
            self.evaluations += 1
            self.known[key] = float(self.evaluate(dict(assignment)))
        return self.known[key]

    def acceptable(self, entries: Sequence[Entry]) -> bool:
        return self.perplexity(self.applied(entries)) <= self.limit  # False for nan

    def applied(self, entries: Sequence[Entry]) -> dict[str, Recipe]:
        assignment: dict[str, Recipe] = {}
        for entry in entries:
            if self._saves(entry, assignment):
                assignment[entry.component] = self._stored(entry)
        return assignment

    def longest_head(self) -> int:
        """How many entries from the start can be accepted together, by binary search."""
        low, high = 0, len(self.order)  # low is acceptable; everything above high is assumed not to be
        while low < high:
            middle = (low + high + 1) // 2
            if self.acceptable(self.order[:middle]):
                low = middle
            else:
                high = middle - 1
        return low

    def run(self, head: int) -> tuple[list[Entry], list[Entry]]:
        """Accepts the first `head` entries, then tries the others one by one."""
        accepted = list(self.order[:head])
        rejected: list[Entry] = []
        for entry in self.order[head:]:
            if not self._saves(entry, self.applied(accepted)):
                continue
            if self.acceptable([*accepted, entry]):
                accepted.append(entry)
            else:
                rejected.append(entry)
        return accepted, rejected

    def _saves(self, entry: Entry, assignment: Mapping[str, Recipe]) -> bool:
        component = self.components[entry.component]
        current = assignment.get(entry.component, FP16)
        return component_bytes(component, self._stored(entry)) < component_bytes(component, current)

    def _stored(self, entry: Entry) -> Recipe:
        return stored_recipe(self.components[entry.component], entry.recipe)[0]
