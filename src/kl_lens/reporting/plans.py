"""Plans as the report shows them: with their cost, their family, and what is known of their quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kl_lens import planning
from kl_lens.reporting.names import plan_title, short_title
from kl_lens.run.records import Component, Estimate, Plan
from kl_lens.weights.recipes import Recipe

# Families of plans in the order in which legends list them.
FAMILIES = {
    "uniform": "one format for all",
    "paper": "paper's points",
    "exact": "KL Lens",
    "greedy": "greedy",
    "stock": "stock recipes",
    "other": "other plans",
}


@dataclass(frozen=True)
class PlanView:
    """A plan with its cost and with what is known of its quality."""

    plan: Plan
    cost: planning.Cost
    stored: dict[str, Recipe]  # what each component really has
    name: str
    target: str | None  # that it was made for
    family: str
    title: str
    label: str  # short, for figures: p05, INT8
    bytes: int  # of the target's file, where it was made for one; else of the weights
    kl: Estimate | None  # measured as a whole on held-out text
    perplexity: Estimate | None
    original_perplexity: float | None
    measured_on: str | None


def read_plans(folder: Path, components: tuple[Component, ...]) -> tuple[PlanView, ...]:
    """All plans of a run: families in order, each from large to small."""
    order, views = list(FAMILIES), []
    for path in sorted(folder.glob("*.json")):
        plan = planning.read_plan(path, components)
        cost, seen = planning.cost_of(components, plan.assignment), plan.measured
        known = (seen.kl, seen.perplexity, seen.original_perplexity, seen.place) if seen else (None,) * 4
        views.append(
            PlanView(
                plan, cost, cost.stored, plan.name, plan.target, plan.family,
                plan_title(plan.name), short_title(plan), cost.bytes + plan.fixed_bytes, *known,
            )
        )  # fmt: skip
    return tuple(sorted(views, key=lambda p: (order.index(p.family), -p.bytes, p.name)))
