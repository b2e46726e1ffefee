"""Measured improvement of a plan: prediction proposes, measurement decides.

The additive prediction misses how components interact. Starting from a plan, this tries changes that keep
the bytes within the budget: one group of components to a better recipe where there is room for it, or one
up and another down. Changes are tried in the order of their predicted gain and accepted only where the
measured KL falls by more than `z` standard errors of the paired difference over windows. Each acceptance
lowers the measured KL, so the result is never worse on the text it was refined on. Many tries at two
standard errors still accept a few lucky ones, so a second text can `confirm` the whole: unless the refined
plan is better there too, the plan it started from is given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kl_lens.errors import PlanError
from kl_lens.planning.predict import finished_plan, finite_or_none
from kl_lens.planning.problem import Problem
from kl_lens.records import Plan, SensitivityTable
from kl_lens.units import human_bytes

Windows = npt.NDArray[np.float64]
# Mean KL of every window of a fixed text under an assignment; the same windows in the same order each time.
Measure = Callable[[Mapping[str, str]], Windows]
Change = tuple[tuple[int, int], ...]  # (group, choice it goes to), one or two of them


@dataclass(frozen=True)
class PairedDifference:
    """KL of one plan less that of another on the same windows; negative is better."""

    mean: float
    standard_error: float

    def better(self, z: float) -> bool:
        return self.mean < 0 and self.mean < -z * self.standard_error


@dataclass(frozen=True)
class Trial:
    """One change that was measured."""

    changes: tuple[tuple[str, str, str], ...]  # (component, recipe before, recipe tried)
    predicted_gain: float
    difference: PairedDifference
    bytes: int
    accepted: bool


@dataclass(frozen=True)
class Refinement:
    assignment: dict[str, str]
    bytes: int
    kl_before: float
    kl_after: float
    gain: PairedDifference  # refined less unrefined, on the refining text
    confirmed: PairedDifference | None  # the same on the confirming text, before any reverting
    reverted: bool  # the confirming text did not agree, so this is the unrefined plan
    evaluations: int
    exhausted: bool  # True: no change is left to try; False: stopped at max_evaluations
    history: tuple[Trial, ...]


def refine(
    problem: Problem,
    assignment: Mapping[str, str],
    measure: Measure,
    *,
    max_bytes: float | None = None,
    max_evaluations: int = 200,
    z: float = 2.0,
    confirm: Measure | None = None,
) -> Refinement:
    """Improves a plan by measured changes within `max_bytes` (default: the plan's own size)."""
    selection = problem.selection(assignment)
    start = list(selection)
    size = problem.totals(selection).bytes
    budget = size if max_bytes is None else math.floor(max_bytes)
    if size > budget:
        raise PlanError(
            f"the plan to refine takes {human_bytes(size)}, more than the {human_bytes(budget)} allowed"
        )
    first = current = _checked(measure(problem.assignment(selection)), None)
    evaluations, base = 1, 0
    history: list[Trial] = []
    tried_against: dict[tuple[tuple[int, int, int], ...], int] = {}
    exhausted = False
    while evaluations < max_evaluations:
        change = _next_change(problem, selection, budget, tried_against, base)
        if change is None:
            exhausted = True
            break
        candidate = list(selection)
        for group, choice in change:
            candidate[group] = choice
        windows = _checked(measure(problem.assignment(candidate)), current)
        evaluations += 1
        difference = paired_difference(windows, current)
        accepted = difference.better(z)
        history.append(_trial(problem, selection, candidate, change, difference, accepted))
        tried_against[_key(selection, change)] = base
        if accepted:
            selection, current, base = candidate, windows, base + 1
    gain = paired_difference(current, first)
    confirmed, reverted = None, False
    if confirm is not None and selection != start:
        before = _checked(confirm(problem.assignment(start)), None)
        confirmed = paired_difference(_checked(confirm(problem.assignment(selection)), before), before)
        evaluations += 2
        if not confirmed.mean < 0:
            selection, current, gain, reverted = start, first, PairedDifference(0.0, 0.0), True
    return Refinement(
        assignment=problem.assignment(selection),
        bytes=problem.totals(selection).bytes,
        kl_before=float(first.mean()),
        kl_after=float(current.mean()),
        gain=gain,
        confirmed=confirmed,
        reverted=reverted,
        evaluations=evaluations,
        exhausted=exhausted,
        history=tuple(history),
    )


def refined_plan(table: SensitivityTable, plan: Plan, result: Refinement, name: str) -> Plan:
    """The plan that refining another one gave, with what came of it in the notes."""
    refinement = {
        "kl_before": result.kl_before,
        "kl_after": result.kl_after,
        "gain": -result.gain.mean,
        "gain_standard_error": finite_or_none(result.gain.standard_error),  # one window has none
        "accepted": sum(trial.accepted for trial in result.history),
        "evaluations": result.evaluations,
        "exhausted": result.exhausted,
        "reverted": result.reverted,
    }
    notes = {key: value for key, value in plan.notes.items() if key != "verification"}
    refined = finished_plan(
        table,
        name,
        result.assignment,
        f"{plan.made_by}, refined by measured swaps",
        notes | {"refinement": refinement},
        family="refined",
    )
    return replace(
        refined,
        limits=plan.limits,
        fixed_bytes=plan.fixed_bytes,
        statistics=plan.statistics,
        refined_from=plan.name,
    )


def paired_difference(windows: Windows, reference: Windows) -> PairedDifference:
    difference = windows - reference
    if len(difference) < 2:
        return PairedDifference(float(difference.mean()), math.inf)
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return PairedDifference(float(difference.mean()), error)


def _key(selection: Sequence[int], change: Change) -> tuple[tuple[int, int, int], ...]:
    """A change by where it goes from and to, so that it counts as new once its groups have moved."""
    return tuple(sorted((group, selection[group], choice) for group, choice in change))


def _next_change(
    problem: Problem,
    selection: Sequence[int],
    budget: int,
    tried_against: Mapping[tuple[tuple[int, int, int], ...], int],
    base: int,
) -> Change | None:
    """The untried change of largest predicted gain; then those last tried before the plan moved on."""
    stale: Change | None = None
    for change in _changes(problem, selection, budget):
        last = tried_against.get(_key(selection, change))
        if last is None:
            return change
        if last < base and stale is None:
            stale = change
    return stale


def _changes(problem: Problem, selection: Sequence[int], budget: int) -> Iterator[Change]:
    """Single upgrades and swaps that fit the budget, largest predicted gain first."""
    slack = budget - problem.totals(selection).bytes
    moves: list[tuple[int, int]] = []
    extra_bytes: list[int] = []
    gains: list[float] = []
    for group, now in enumerate(selection):
        choices = problem.groups[group].choices
        for index, choice in enumerate(choices):
            if index != now:
                moves.append((group, index))
                extra_bytes.append(choice.bytes - choices[now].bytes)
                gains.append(choices[now].kl - choice.kl)
    extra, gain = np.array(extra_bytes, dtype=np.int64), np.array(gains)
    owner = np.array([group for group, _ in moves], dtype=np.intp)
    ups = np.flatnonzero((gain > 0) | ((gain == 0) & (extra > 0)))
    downs = np.flatnonzero(extra < 0)
    singles = ups[extra[ups] <= slack]
    fits = (extra[ups][:, None] + extra[downs][None, :] <= slack) & (
        owner[ups][:, None] != owner[downs][None, :]
    )
    # An up that fits alone needs no down with it: the single upgrade is tried instead.
    fits &= (extra[ups] > slack)[:, None]
    pairs = np.argwhere(fits)
    scores = np.concatenate([gain[singles], gain[ups[pairs[:, 0]]] + gain[downs[pairs[:, 1]]]])
    for place in np.argsort(-scores, kind="stable"):
        if place < len(singles):
            yield (moves[singles[place]],)
        else:
            up, down = pairs[place - len(singles)]
            yield moves[ups[up]], moves[downs[down]]


def _trial(
    problem: Problem,
    before: Sequence[int],
    after: Sequence[int],
    change: Change,
    difference: PairedDifference,
    accepted: bool,
) -> Trial:
    named = []
    for group, choice in change:
        choices = problem.groups[group].choices
        for member in problem.groups[group].members:
            named.append((member, choices[before[group]].recipe, choices[choice].recipe))
    old, new = problem.totals(before), problem.totals(after)
    return Trial(tuple(named), old.kl - new.kl, difference, new.bytes, accepted)


def _checked(windows: npt.ArrayLike, like: Windows | None) -> Windows:
    values = np.asarray(windows, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or (like is not None and len(values) != len(like)):
        raise PlanError(
            f"measuring a plan must give one KL per window, the same windows each time; got shape {values.shape}"
        )
    return values
