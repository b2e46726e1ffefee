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
    row: planning.PlanRow
    stored: dict[str, Recipe]  # what each component really has
    label: str  # short, for figures: p05, INT8

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def title(self) -> str:
        return plan_title(self.plan.name)

    @property
    def family(self) -> str:
        return self.plan.family

    @property
    def kl(self) -> Estimate | None:
        """Measured as a whole on held-out text."""
        return self.plan.measured.kl if self.plan.measured else None

    @property
    def perplexity(self) -> Estimate | None:
        return self.plan.measured.perplexity if self.plan.measured else None

    @property
    def original_perplexity(self) -> float | None:
        return self.plan.measured.original_perplexity if self.plan.measured else None

    @property
    def measured_on(self) -> str | None:
        return self.plan.measured.place if self.plan.measured else None

    @property
    def target(self) -> str | None:
        """The target it was made for."""
        return self.plan.target

    @property
    def bytes(self) -> int:
        """Of the target's file, where it was made for one; else of the weights."""
        return self.row.bytes + self.plan.fixed_bytes


def read_plans(folder: Path, components: tuple[Component, ...]) -> tuple[PlanView, ...]:
    """All plans of a run: families in order, each from large to small."""
    plans = [planning.read_plan(path, components) for path in sorted(folder.glob("*.json"))]
    order = list(FAMILIES)
    views = [_plan_view(plan, components) for plan in plans]
    return tuple(sorted(views, key=lambda p: (order.index(p.family), -p.bytes, p.name)))


def _plan_view(plan: Plan, components: tuple[Component, ...]) -> PlanView:
    return PlanView(
        plan=plan,
        row=planning.plan_row(plan, components),
        stored=planning.cost_of(components, plan.assignment).stored,
        label=short_title(plan),
    )
