"""Plans as the report shows them: with their cost, their family, and what is known of their quality."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens import planning
from kl_lens.records import Component, Estimate, Plan

# Families of plans in the order in which legends list them.
FAMILIES = {
    "uniform": "uniform",
    "paper": "paper's points",
    "exact": "exact budget",
    "refined": "refined",
    "greedy": "greedy",
    "other": "other plans",
}


@dataclass(frozen=True)
class PlanView:
    """A plan with its cost and with what is known of its quality."""

    plan: Plan
    row: planning.PlanRow
    stored: dict[str, str]  # component → format it really has
    family: str
    label: str  # short, for figures: p05, INT8
    kl: Estimate | None  # measured as a whole on held-out text
    perplexity: Estimate | None
    original_perplexity: float | None
    measured_on: str | None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def bytes(self) -> int:
        return self.row.bytes


def read_plans(folder: Path, components: tuple[Component, ...]) -> tuple[PlanView, ...]:
    """All plans of a run: families in order, each from large to small."""
    found = []
    for path in sorted(folder.glob("*.json")):
        plan = planning.read_plan(path, components)
        found.append(_plan_view(plan, components))
    order = list(FAMILIES)
    return tuple(sorted(found, key=lambda p: (order.index(p.family), -p.bytes, p.name)))


def _plan_view(plan: Plan, components: tuple[Component, ...]) -> PlanView:
    notes = plan.notes
    family = _family(plan)
    return PlanView(
        plan=plan,
        row=planning.plan_row(plan, components),
        stored=planning.cost_of(components, plan.assignment).stored,
        family=family,
        label=_label(plan.name, family),
        kl=_noted(notes, "measured_kl"),
        perplexity=_noted(notes, "perplexity"),
        original_perplexity=notes.get("original_perplexity"),
        measured_on=notes.get("measured_on"),
    )


def _noted(notes: Mapping[str, Any], key: str) -> Estimate | None:
    value, error = notes.get(key), notes.get(f"{key}_standard_error")
    if not isinstance(value, int | float):
        return None
    return Estimate(float(value), float(error) if isinstance(error, int | float) else math.nan)


def _family(plan: Plan) -> str:
    if plan.name.startswith("uniform_"):
        return "uniform"
    if "refined_from" in plan.notes or "refined" in plan.made_by:
        return "refined"
    for start, family in (
        ("the paper", "paper"),
        ("exact", "exact"),
        ("Pareto", "exact"),
        ("greedy", "greedy"),
    ):
        if plan.made_by.startswith(start):
            return family
    return "other"


def _label(name: str, family: str) -> str:
    if family == "uniform":
        return name.removeprefix("uniform_").upper()
    if family == "paper" and (digits := re.search(r"(\d+)$", name)):
        return f"p{digits[1]}"
    return name
