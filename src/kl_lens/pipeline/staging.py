"""Staged search: predict what every candidate loses, and measure what plans can use.

With a limit, these are the recipes that plans near the limit choose. The measured values correct the predictions, and
planning is repeated until it chooses nothing new. Without a limit, they are the recipes near the lower convex hull of
bytes and error: no plan of any size uses the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kl_lens import planning
from kl_lens.errors import BudgetError
from kl_lens.pipeline.planning import KL, TargetPlanner
from kl_lens.recipes import parsed
from kl_lens.records import Estimate, Measurement, Plan, SensitivityTable
from kl_lens.runs import CALIBRATION
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.pieces import key_of
from kl_lens.sensitivity.screening import WINDOWS, Key, Screen
from kl_lens.sensitivity.sweep import Sweep, SweepResult
from kl_lens.text import Windows

SCREENING = "screening"  # role of the first measurements, on few windows
TOLERANCE = 0.15  # above the hull, within the error of predictions
# Plans are made for these shares of the limit: a file may need more bytes than its parts, and a whole plan often loses
# more than the sum of its parts. The first round takes the middle one.
SIZES, LOSSES = (0.98, 0.99, 1.0), (0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Limits:
    """What `run` asks of a plan; at most one is given."""

    max_bytes: int | None = None
    max_loss: float | None = None
    max_drop: float | None = None

    @property
    def of_plans(self) -> list[dict[str, Any]]:
        if self.max_bytes is not None:
            return [{"max_bytes": share * self.max_bytes} for share in SIZES]
        loss = self.max_loss if self.max_drop is None else math.log1p(self.max_drop)
        return [] if loss is None else [{"max_kl": share * loss} for share in LOSSES]


class StagedSearch:
    """Chooses and measures the candidates that are worth it."""

    def __init__(self, sweep: Sweep, planner: TargetPlanner, screen: Screen, windows: Windows) -> None:
        self._sweep, self._planner, self._screen, self._windows = sweep, planner, screen, windows
        self._table = sweep.run.table()

    def near_hull(self) -> list[Candidate]:
        """The candidates that some plan may use, by the errors of their outputs."""
        target = self._planner.target
        problem = planning.build_problem(self._with(self._screen.errors), target=target, metric=KL)
        far: set[Key] = set()
        for group in problem.groups:
            sizes = np.array([float(choice.bytes) for choice in group.choices])
            errors = np.array([choice.kl for choice in group.choices])
            corners = planning.corners(errors, sizes)
            lowest = np.interp(sizes, sizes[corners], errors[corners])
            for choice, too_far in zip(group.choices, errors > (1 + TOLERANCE) * lowest, strict=True):
                far |= {(member, choice.recipe) for member in group.members if too_far}
        return [c for c in self._screen.candidates if key_of(c) not in far]

    def measure(self, limits: Limits) -> tuple[SweepResult, list[Candidate]]:
        """Measures what plans within the limits choose; also returns these candidates."""
        few = self._windows.first(max(1, len(self._windows) // WINDOWS))
        results = [self._sweep.measure(self._screen.first, few, SCREENING)]
        first = self._values(self._screen.first, SCREENING, len(few))
        chosen: list[Candidate] = []
        for shares in (slice(1, 2), slice(None), slice(None)):
            known = self._values(chosen, CALIBRATION, len(self._windows))
            wanted = self._contenders(self._screen.predicted(first, known), limits, shares)
            new = [c for c in self._screen.candidates if key_of(c) in wanted and c not in chosen]
            if new:
                results.append(self._sweep.measure(new, self._windows))
                chosen += new
        return _together(results, len(chosen)), chosen

    def _contenders(self, predicted: Mapping[Key, float], limits: Limits, shares: slice) -> set[Key]:
        """What plans near the limit choose."""
        planner, table = self._planner, self._with(predicted)
        plans = [self._plan(table, limit, limits.of_plans[-1]) for limit in limits.of_plans[shares]]
        found = {key for plan in plans for key in parsed(plan.assignment).items()}
        if planner.target is not None and limits.max_bytes is not None:
            found |= self._stock(table, plans[-1].predicted_kl or 0.0, limits.max_bytes)
        return found

    def _plan(self, table: SensitivityTable, limit: dict[str, Any], whole: dict[str, Any]) -> Plan:
        """Within a share of the limit, or if that is too little, within the whole."""
        planner = self._planner
        how: dict[str, Any] = {"target": planner.target, "fixed_bytes": planner.fixed_bytes, "metric": KL}
        try:
            return planning.plan_for_budget(table, **limit, **how).plan
        except BudgetError:
            return planning.plan_for_budget(table, **whole, **how).plan

    def _stock(self, table: SensitivityTable, loss: float, most: int) -> set[Key]:
        """Stock recipes with our methods that fit and lose less, by bytes that only a written file shows."""
        planner, predictor = self._planner, planning.Predictor(table, KL)
        assert planner.target is not None
        stock = [one.assignment for one in planner.target.stock_recipes(planner.model)]
        found: set[Key] = set()
        for assignment in planning.stock_with_our_methods(table, stock, target=planner.target, metric=KL):
            total, size = predictor.total(assignment), planning.cost_of(table.components, assignment).bytes
            if size + planner.fixed_bytes <= most and total is not None and total.value < loss:
                found |= set(assignment.items())
        return found

    def _with(self, values: Mapping[Key, float]) -> SensitivityTable:
        """The run's table with these values as its measurements."""
        rows = (
            Measurement(name, recipe, {KL: Estimate(max(value, 0.0), 0.0)}, 0, 0, "predicted", 0.0)
            for (name, recipe), value in values.items()
        )
        return replace(self._table, measurements=tuple(rows))

    def _values(self, candidates: Sequence[Candidate], role: str, windows: int) -> dict[Key, float]:
        found = {key_of(c): self._sweep.kl(c, windows, role) for c in candidates}
        return {key: value for key, value in found.items() if value is not None}


def _together(results: Sequence[SweepResult], candidates: int) -> SweepResult:
    failures = {name: why for result in results for name, why in result.failures.items()}
    return replace(
        results[-1],
        candidates=candidates,
        measured=sum(r.measured for r in results),
        reused=sum(r.reused for r in results),
        seconds=sum(r.seconds for r in results),
        failures=failures,
    )
