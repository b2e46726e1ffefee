"""Plans as table rows: size, predicted and measured KL, share of each recipe, and where plans differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.base.errors import PlanError
from kl_lens.planning.cost import RecipeShare, cost_of
from kl_lens.run.records import Component, Plan
from kl_lens.weights.recipes import FP16, Recipe


@dataclass(frozen=True)
class PlanRow:
    name: str
    bytes: int
    bits_per_weight: float
    predicted_kl: float | None
    measured_kl: float | None
    perplexity: float | None
    shares: tuple[RecipeShare, ...]

    @property
    def shares_text(self) -> str:
        """`int8 40 (61.2 %), int4 10 (8.0 %), kept 73 (0.3 %)`: components, and share of all weights."""
        return ", ".join(
            f"{share.recipe if share.quantizable else 'kept'} {share.components} ({share.share:.1%})".replace(
                "%", " %"
            )
            for share in self.shares
        )


@dataclass(frozen=True)
class Difference:
    """A component with different recipes in these plans."""

    component: str
    recipes: tuple[Recipe, ...]  # in the order of the plans


@dataclass(frozen=True)
class Comparison:
    rows: tuple[PlanRow, ...]
    differences: tuple[Difference, ...]


def plan_row(plan: Plan, components: Iterable[Component]) -> PlanRow:
    cost = cost_of(components, plan.assignment)
    return PlanRow(
        name=plan.name,
        bytes=cost.bytes,
        bits_per_weight=cost.bits_per_weight,
        predicted_kl=plan.predicted_kl,
        measured_kl=plan.measured.kl.value if plan.measured else None,
        perplexity=plan.measured.perplexity.value if plan.measured else None,
        shares=cost.shares,
    )


def compare(plans: Sequence[Plan], components: Iterable[Component]) -> Comparison:
    """Plans side by side, and every component on which they differ, in the model's order."""
    components = tuple(components)
    if len(plans) < 2:
        raise PlanError("comparing needs at least two plans")
    stored = [cost_of(components, plan.assignment).stored for plan in plans]
    differences = []
    for component in components:
        recipes = tuple(assignment.get(component.name, FP16) for assignment in stored)
        if len(set(recipes)) > 1:
            differences.append(Difference(component.name, recipes))
    return Comparison(tuple(plan_row(plan, components) for plan in plans), tuple(differences))
