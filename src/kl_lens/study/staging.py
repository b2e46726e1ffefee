"""Staged search: predict what every candidate loses, plan with that, and measure what plans near the limit choose.

The measured values correct the predictions, and the next plans are made with them. What is not chosen is not measured,
so every plan consists of measured candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from kl_lens import planning
from kl_lens.base.errors import BudgetError
from kl_lens.measuring.perturbation import Candidate, key_of
from kl_lens.measuring.screening import PART, Key, Screen
from kl_lens.measuring.sweep import Sweep, SweepResult, error_work, quantizing_work, work_of
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION
from kl_lens.run.records import PREDICTED, Estimate, Measurement, Plan, SensitivityTable
from kl_lens.study.planner import KL, TargetPlanner, limited_loss, nats_allowed
from kl_lens.study.settings import Limits
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import parsed

SCREENING = "screening"  # role of the first measurements, on little text
# Shares of the limit to plan for, round by round; every round plans with what the one before has measured. Below the
# range of the last round a plan would lack larger formats and lose much; above it, it would only lack smaller ones.
OF_LOSS, OF_BYTES = ((1.0,), (0.9, 1.0)), ((1.0,), (0.985, 1.0))  # a file may need more bytes than its parts
UNSURE = 1.2  # predictions count so much more than measurements: only clear gains are worth measuring
MEASURED = 1.3  # candidates per component, for forecasts; benchmarks/staged.py


def expected_work(model: LoadedModel, screen: Screen, windows: int, length: int) -> float:
    """Of screening and all rounds, in the units of the sweep's progress."""
    names = {candidate.component.name for candidate in screen.candidates}
    each = [work_of(model, c) * windows + quantizing_work(c, length) for c in screen.candidates]
    rounds = (MEASURED + _few(windows) / windows) * len(names) / len(each) * sum(each)
    return rounds + sum(map(error_work, screen.needed))


def _few(windows: int) -> int:
    return max(1, windows // PART)


def measured_kl(
    sweep: Sweep, candidates: Sequence[Candidate], windows: int, role: str = CALIBRATION
) -> dict[Key, float]:
    found = {key_of(c): sweep.kl(c, windows, role) for c in candidates}
    return {key: value for key, value in found.items() if value is not None}


def staged_search(
    sweep: Sweep,
    planner: TargetPlanner,
    screen: Screen,
    errors: Mapping[Key, float],
    windows: Windows,
    limits: Limits,
) -> tuple[SweepResult, list[Candidate], dict[Key, float]]:
    """Measures what plans within the limits choose; also returns these candidates, and every one's KL.

    `errors`: of the outputs, for all that `screen` needs.
    """
    few, table = windows.first(_few(len(windows))), sweep.run.table()
    results = [sweep.measure(screen.first, few, SCREENING, noise=False)]
    first = measured_kl(sweep, screen.first, len(few), SCREENING)
    chosen: list[Candidate] = []

    def known(unsure: float = 1.0) -> SensitivityTable:
        """`unsure`: times what is only predicted, once something is measured."""
        measured = measured_kl(sweep, chosen, len(windows))
        values = screen.predicted(errors, first, measured)
        rows = (
            Measurement(name, recipe, {KL: Estimate(max(value, 0.0), 0.0)}, 0, 0, PREDICTED, 0.0)
            for (name, recipe), kl in values.items()
            for value in [kl * unsure ** ((name, recipe) not in measured and bool(measured))]
        )
        return replace(table, measurements=tuple(rows))

    def measure(plans: Sequence[Plan], others: Collection[Key] = ()) -> None:
        wanted = set(others).union(*(parsed(plan.assignment).items() for plan in plans))
        new = [c for c in screen.candidates if key_of(c) in wanted and c not in chosen]
        if new:
            results.append(sweep.measure(new, windows))
            chosen.extend(new)

    if limits.max_bytes is not None:
        for shares in OF_BYTES:
            plans = []
            for share in shares:
                with suppress(BudgetError) if share < 1 else nullcontext():
                    plans.append(_plan(planner, known(UNSURE), max_bytes=share * limits.max_bytes))
            measure(plans, _stock(planner, known(), plans[-1].predicted_kl or 0.0, limits.max_bytes))
    else:
        room = nats_allowed(limits.loss)
        for shares in OF_LOSS:
            room = _room(planner, known(), room, limits)
            measure([_plan(planner, known(UNSURE), max_kl=share * room) for share in shares])
    whole, measured = results[-1], measured_kl(sweep, chosen, len(windows))
    if others := screen.samples(measured):
        results.append(sweep.measure(others, few, SCREENING, noise=False))
    samples = measured_kl(sweep, others, len(few), SCREENING)
    whole = replace(
        whole,
        candidates=len(chosen),
        measured=sum(result.measured for result in results),
        reused=sum(result.reused for result in results),
        seconds=sum(result.seconds for result in results),
    )
    return whole, chosen, screen.predicted(errors, first, measured, samples)


def _plan(planner: TargetPlanner, table: SensitivityTable, **limit: Any) -> Plan:
    problem = planning.build_problem(table, target=planner.target, fixed_bytes=planner.fixed_bytes, metric=KL)
    return planning.plan_for_budget(problem, **limit).plan


def _room(planner: TargetPlanner, table: SensitivityTable, room: float, limits: Limits) -> float:
    """The sum of KLs at which whole plans reach the limit on the held-out half that decides, with one standard error:
    by a plan for the sum that seemed right so far. (`plan` asks the other half too: a few percent, and the plans of the
    last round begin below.)"""
    plan = _plan(planner, table, max_kl=room)
    parts = planning.Predictor(table, KL).total(plan.assignment)
    if parts is None or parts.value <= 0:
        return room
    loss = limited_loss(planner.halves[0].measure(plan.assignment), limits.loss)
    return parts.value * min(2.0, nats_allowed(limits.loss) / max(loss.value + loss.standard_error, 1e-12))


def _stock(planner: TargetPlanner, table: SensitivityTable, loss: float, most: int) -> set[Key]:
    """Stock recipes with our methods that fit and lose less, by bytes that only a written file shows."""
    if planner.target is None:
        return set()
    stock = [one.assignment for one in planner.target.stock_recipes(planner.model)]
    found: set[Key] = set()
    problem = planning.build_problem(table, target=planner.target, metric=KL, keep_fused=False)
    for assignment in planning.stock_with_our_methods(problem, stock):
        total = problem.predictor.total(assignment)
        size = planning.cost_of(table.components, assignment).bytes + planner.fixed_bytes
        if size <= most and total is not None and total.value < loss:
            found |= set(assignment.items())
    return found
