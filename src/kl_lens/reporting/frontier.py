"""Every size that a target's file can have, from the smallest to FP16, with the best known plan or file of each.

Plans are corners of the hull of all plans: each is the optimum at its own size, as `kl-lens plan` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kl_lens import planning
from kl_lens.base.errors import KLLensError, PlanError
from kl_lens.planning.knapsack import hull_of
from kl_lens.reporting.names import plan_title, runtime_title, short_title
from kl_lens.run.folder import Run
from kl_lens.run.records import Component, Estimate, Plan, SensitivityTable
from kl_lens.targets import get_target
from kl_lens.weights.recipes import FP16, Recipe

MOST = 240  # positions of a slider
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


@dataclass(frozen=True)
class Position:
    """A plan that can be made, or a file that was."""

    bytes: int
    kl: float  # predicted, or measured on the whole file
    stored: Mapping[str, Recipe]
    seconds: float | None = None  # per token, predicted
    file: PlanView | None = None
    measured: Estimate | None = None  # of the file


@dataclass(frozen=True)
class Space:
    """All plans for one target, or for none (weights alone)."""

    target: str | None
    table: SensitivityTable
    problem: planning.Problem
    factor: float  # by which whole plans were seen to lose more than their parts
    noise: float | None  # KL of the original against itself
    speed: planning.SpeedModel | None = None  # where the problem's seconds are from
    no_speed: str = ""  # why there is none

    @property
    def title(self) -> str:
        return "weights alone" if self.target is None else runtime_title(self.target)

    def plans(self) -> list[Position]:
        """The best plans from small to large, evenly many."""
        groups = self.problem.groups
        kls = [np.array([c.kl for c in group.choices]) for group in groups]
        hull = hull_of(kls, [np.array([c.bytes for c in group.choices], float) for group in groups])
        # The steps nearest to sizes that are equal factors apart.
        wanted = np.geomspace(max(hull.amounts[0], 1), max(hull.amounts[-1], 1), MOST)
        steps = sorted(
            {0, len(hull.steps), *np.searchsorted(hull.amounts, wanted).clip(0, len(hull.steps)).tolist()}
        )
        return [self._made(hull.selection(step)) for step in steps]

    def _made(self, selection: Sequence[int]) -> Position:
        totals = self.problem.totals(selection)
        seconds = totals.seconds if self.speed else None
        return Position(totals.bytes, self.factor * totals.kl, self.problem.assignment(selection), seconds)


def frontier(space: Space, files: Sequence[Position]) -> list[Position]:
    """The best known at each size: a plan as predicted, or a file as measured. It never rises with size."""
    found: list[Position] = []
    for each in sorted([*space.plans(), *files], key=lambda position: (position.bytes, position.kl)):
        if not found or each.kl < found[-1].kl:
            found.append(each)
    return found


def read_spaces(run: Run, plans: Sequence[PlanView]) -> tuple[dict[str | None, Space], tuple[str, ...]]:
    """One for each target that the run has plans for, one for plans without a target; and why there is none."""
    targets: list[str | None] = [*sorted({p.target for p in plans if p.target})]
    if "components" not in run.identity:
        return {}, ()
    if not targets or any(p.target is None and set(p.stored.values()) != {FP16} for p in plans):
        targets.append(None)
    spaces, missing = dict[str | None, Space](), []
    for target in targets:
        try:
            spaces[target] = _space(run, target, plans)
        except KLLensError as error:
            whose = runtime_title(target) if target else "weights alone"
            missing.append(f"No slider for {whose}: {error}.")
    return spaces, tuple(missing)


def _space(run: Run, name: str | None, plans: Sequence[PlanView]) -> Space:
    table, target = run.table(target=name, predicted=True), get_target(name) if name else None
    made = [p.plan for p in plans if p.target == name and p.family != "stock"]
    ours = next((plan for plan in made if plan.name == run.recommended(name)), made[0] if made else None)
    speed, no_speed = None, ""
    try:
        speed = planning.speed_model(run, table, target) if target else None
    except PlanError as error:
        no_speed = str(error)
    fixed_bytes = planning.stored_fixed_bytes(run, target)
    problem = planning.build_problem(table, speed=speed, target=target, fixed_bytes=fixed_bytes)
    noise = (run.load("noise", run.measured_role(name)) or {}).get("kl_teacher_to_student")
    return Space(name, table, problem, ours.interaction if ours else 1.0, noise, speed, no_speed)
