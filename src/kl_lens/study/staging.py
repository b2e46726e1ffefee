"""Staged search: predict what every candidate loses, plan with that, and measure what plans near the limit choose.

The measured values correct the predictions, and the next plans are made with them. What is not chosen is not measured,
so every plan consists of measured candidates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from kl_lens import planning
from kl_lens.base.errors import BudgetError
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.pieces import key_of
from kl_lens.measuring.screening import PART, Key, Screen
from kl_lens.measuring.sweep import Sweep, SweepResult, error_work, quantizing_work, work_of
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION
from kl_lens.run.records import PREDICTED, Estimate, Measurement, Plan, SensitivityTable
from kl_lens.study.planner import KL, TargetPlanner
from kl_lens.text import Windows
from kl_lens.weights.recipes import parsed

SCREENING = "screening"  # role of the first measurements, on little text
# Shares of the limit to plan for, round by round; every round plans with what the one before has measured. Below the
# range of the last round a plan would lack larger formats and lose much; above it, it would only lack smaller ones.
OF_LOSS, OF_BYTES = ((1.0,), (0.9, 1.0)), ((1.0,), (0.985, 1.0))  # a file may need more bytes than its parts
UNSURE = 1.2  # predictions count so much more than measurements: only clear gains are worth measuring
MEASURED = 1.3  # candidates per component, for forecasts; benchmarks/staged.py


@dataclass(frozen=True)
class Limits:
    """What `run` asks of a plan; at most one is given."""

    max_bytes: int | None = None
    max_loss: float | None = None
    max_drop: float | None = None

    @property
    def loss(self) -> float | None:
        return self.max_loss if self.max_drop is None else math.log1p(self.max_drop)

    def __bool__(self) -> bool:
        return self.max_bytes is not None or self.loss is not None


def expected_work(model: LoadedModel, screen: Screen, windows: Windows) -> float:
    """Of screening and all rounds, in the units of the sweep's progress."""
    names = {candidate.component.name for candidate in screen.candidates}
    each = [work_of(model, c) * len(windows) + quantizing_work(c, windows.length) for c in screen.candidates]
    rounds = (MEASURED + _few(windows) / len(windows)) * len(names) / len(each) * sum(each)
    return rounds + sum(map(error_work, screen.needed))


def _few(windows: Windows) -> int:
    return max(1, len(windows) // PART)


class StagedSearch:
    """Chooses and measures the candidates that are worth it."""

    def __init__(
        self,
        sweep: Sweep,
        planner: TargetPlanner,
        screen: Screen,
        errors: Mapping[Key, float],
        windows: Windows,
    ) -> None:
        """`errors`: of the outputs, for all that `screen` needs."""
        self._sweep, self._planner, self._screen, self._windows = sweep, planner, screen, windows
        self._errors, self._table = errors, sweep.run.table()

    def measure(self, limits: Limits) -> tuple[SweepResult, list[Candidate], dict[Key, float]]:
        """Measures what plans within the limits choose; also returns these candidates, and every one's KL."""
        few = self._windows.first(_few(self._windows))
        results = [self._sweep.measure(self._screen.first, few, SCREENING, noise=False)]
        first = self._values(self._screen.first, SCREENING, len(few))
        chosen: list[Candidate] = []

        def known(unsure: float = 1.0) -> SensitivityTable:
            """`unsure`: times what is only predicted, once something is measured."""
            measured = self._values(chosen, CALIBRATION, len(self._windows))
            values = self._screen.predicted(self._errors, first, measured)
            return self._with(
                {k: v * unsure ** (k not in measured and bool(measured)) for k, v in values.items()}
            )

        def measure(plans: Sequence[Plan], others: Collection[Key] = ()) -> None:
            wanted = set(others).union(*(parsed(plan.assignment).items() for plan in plans))
            new = [c for c in self._screen.candidates if key_of(c) in wanted and c not in chosen]
            if new:
                results.append(self._sweep.measure(new, self._windows))
                chosen.extend(new)

        if limits.max_bytes is not None:
            for shares in OF_BYTES:
                plans = []
                for share in shares:
                    with suppress(BudgetError) if share < 1 else nullcontext():
                        plans.append(self._plan(known(UNSURE), max_bytes=share * limits.max_bytes))
                measure(plans, self._stock(known(), plans[-1].predicted_kl or 0.0, limits.max_bytes))
        else:
            assert limits.loss is not None
            room = limits.loss
            for shares in OF_LOSS:
                room = self._room(known(), room, limits)
                measure([self._plan(known(UNSURE), max_kl=share * room) for share in shares])
        measured = self._values(chosen, CALIBRATION, len(self._windows))
        others = self._screen.samples(measured)
        if others:
            results.append(self._sweep.measure(others, few, SCREENING, noise=False))
        samples = self._values(others, SCREENING, len(few))
        predicted = self._screen.predicted(self._errors, first, measured, samples)
        return _together(results, len(chosen)), chosen, predicted

    def _plan(
        self, table: SensitivityTable, *, max_bytes: float | None = None, max_kl: float | None = None
    ) -> Plan:
        target, fixed_bytes = self._planner.target, self._planner.fixed_bytes
        problem = planning.build_problem(table, target=target, fixed_bytes=fixed_bytes, metric=KL)
        return planning.plan_for_budget(problem, max_bytes=max_bytes, max_kl=max_kl).plan

    def _room(self, table: SensitivityTable, room: float, limits: Limits) -> float:
        """The sum of KLs at which whole plans reach the limit on the held-out half that decides, with one standard
        error: by a plan for the sum that seemed right so far. (`plan` asks the other half too: a few percent,
        and the plans of the last round begin below.)"""
        assert limits.loss is not None
        plan = self._plan(table, max_kl=room)
        parts = planning.Predictor(table, KL).total(plan.assignment)
        if parts is None or parts.value <= 0:
            return room
        result = self._planner.halves[0].measure(plan.assignment)
        loss = result.kl if limits.max_drop is None else result.delta_cross_entropy
        return parts.value * min(2.0, limits.loss / max(loss.value + loss.standard_error, 1e-12))

    def _stock(self, table: SensitivityTable, loss: float, most: int) -> set[Key]:
        """Stock recipes with our methods that fit and lose less, by bytes that only a written file shows."""
        planner = self._planner
        if planner.target is None:
            return set()
        stock = [one.assignment for one in planner.target.stock_recipes(planner.model)]
        found: set[Key] = set()
        problem = planning.build_problem(table, target=planner.target, metric=KL, keep_fused=False)
        for assignment in planning.stock_with_our_methods(problem, stock):
            total, size = (
                problem.predictor.total(assignment),
                planning.cost_of(table.components, assignment).bytes,
            )
            if size + planner.fixed_bytes <= most and total is not None and total.value < loss:
                found |= set(assignment.items())
        return found

    def _with(self, values: Mapping[Key, float]) -> SensitivityTable:
        """The run's table with these values as its measurements."""
        rows = (
            Measurement(name, recipe, {KL: Estimate(max(value, 0.0), 0.0)}, 0, 0, PREDICTED, 0.0)
            for (name, recipe), value in values.items()
        )
        return replace(self._table, measurements=tuple(rows))

    def _values(self, candidates: Sequence[Candidate], role: str, windows: int) -> dict[Key, float]:
        found = {key_of(c): self._sweep.kl(c, windows, role) for c in candidates}
        return {key: value for key, value in found.items() if value is not None}


def _together(results: Sequence[SweepResult], candidates: int) -> SweepResult:
    return replace(
        results[-1],
        candidates=candidates,
        measured=sum(r.measured for r in results),
        reused=sum(r.reused for r in results),
        seconds=sum(r.seconds for r in results),
    )
