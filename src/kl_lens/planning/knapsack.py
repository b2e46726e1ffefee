"""The multiple-choice knapsack, solved to proven optimality with HiGHS.

Picks one choice per group so that the total cost is minimal and every limit holds. Choices that cannot be in the best
selection are removed first. `highs` solves the rest, with costs scaled so that the optimum is large compared with the
solver's absolute tolerances.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kl_lens.base.errors import PlanError
from kl_lens.planning.highs import Indices, Limit, Numbers, Program, exact_sum, feasible, integral, total
from kl_lens.planning.hull import hull_of
from kl_lens.planning.pareto import undominated
from kl_lens.planning.proof import better_selection

__all__ = ["Limit", "Numbers", "Optimum", "minimise"]

# A bound this close to the value (relatively) is equal to it within HiGHS's precision.
ARITHMETIC = 1e-9
MOST_SECONDS = 60.0
SCALED_OPTIMUM = 1e4  # the optimum is scaled to this; HiGHS's 1e-6 is then 1e-10 of it


@dataclass(frozen=True)
class Optimum:
    selection: list[int]
    gap: float  # relative distance to the proven bound; 0.0: proven optimal
    variables: int  # choices left when HiGHS started
    solves: int
    seconds: float


def minimise(costs: Sequence[Numbers], limits: Sequence[Limit]) -> Optimum | None:
    """The best selection, or None if no selection meets the limits."""
    started = time.perf_counter()
    alive = [np.sort(undominated(c, *(limit.amounts[g] for limit in limits))) for g, c in enumerate(costs)]
    cheapest = [int(index[np.argmin(costs[g][index])]) for g, index in enumerate(alive)]
    if feasible(cheapest, limits):
        return Optimum(cheapest, 0.0, len(alive), 0, time.perf_counter() - started)
    alive_or_none = _within_limits(alive, limits)
    if alive_or_none is None:
        return None
    alive = alive_or_none
    incumbent = _first_guess(costs, limits, alive)
    solves = 0
    while True:
        if incumbent is not None:
            alive = _not_worse_than(alive, costs, total(costs, incumbent))
        program = Program(costs, limits, alive)
        scale = _scale(costs, alive, incumbent, program)
        answer = program.solve(scale, MOST_SECONDS - (time.perf_counter() - started))
        solves += answer.solves
        if answer.selection is None:
            if answer.stopped and incumbent is None:
                raise PlanError(f"no plan found within {MOST_SECONDS:g} s; use fewer --formats")
            if incumbent is None:
                return None
            answer.selection = incumbent  # HiGHS ran out of time, or rejected the incumbent by a tolerance
        value, excess = total(costs, answer.selection), _excess(costs, alive, answer.selection)
        variables = sum(map(len, alive))
        # If the first scale was bad, the answer gives a better one.
        if integral(costs) or answer.stopped or excess == 0 or 1e2 <= excess * scale <= 1e8:
            step = 1 / scale if integral(costs) else 0.0
            gap = _relative_gap(value, answer.bound, step)
            selection, gap = _closed_gap(costs, limits, alive, answer.selection, gap, step)
            return Optimum(selection, gap, variables, solves, time.perf_counter() - started)
        incumbent = answer.selection


def _closed_gap(
    costs: Sequence[Numbers],
    limits: Sequence[Limit],
    alive: list[Indices],
    selection: list[int],
    gap: float,
    step: float,
) -> tuple[list[int], float]:
    """If HiGHS leaves a gap and there is one limit, an exact search closes it."""
    if gap == 0.0 or len(limits) != 1:
        return selection, gap
    prices = [c[i].astype(float) for c, i in zip(costs, alive, strict=True)]
    amounts = [a[i].astype(float) for a, i in zip(limits[0].amounts, alive, strict=True)]
    while True:
        value = total(costs, selection)
        improvement = step or ARITHMETIC * abs(value)
        finished, better = better_selection(prices, amounts, float(limits[0].most), value, improvement)
        if better is not None:
            candidate = [int(index[pick]) for index, pick in zip(alive, better, strict=True)]
            if feasible(candidate, limits) and total(costs, candidate) < value:
                selection = candidate
                continue
        return selection, 0.0 if finished and better is None else gap


def _within_limits(alive: list[Indices], limits: Sequence[Limit]) -> list[Indices] | None:
    """Drops choices that break a limit even if all other groups take their smallest."""
    for limit in limits:
        least = [a[i].min() for a, i in zip(limit.amounts, alive, strict=True)]
        room = limit.most - exact_sum(least)
        if room < -ARITHMETIC * abs(limit.most):
            return None
        slack = room + (0 if integral(limit.amounts) else ARITHMETIC * abs(limit.most))
        alive = [i[a[i] - low <= slack] for a, i, low in zip(limit.amounts, alive, least, strict=True)]
        if any(len(index) == 0 for index in alive):
            return None
    return alive


def _first_guess(costs: Sequence[Numbers], limits: Sequence[Limit], alive: list[Indices]) -> list[int] | None:
    """With one limit the hull gives a feasible selection near the optimum."""
    if len(limits) != 1:
        return None
    amounts = [a[i].astype(float) for a, i in zip(limits[0].amounts, alive, strict=True)]
    prices = [c[i].astype(float) for c, i in zip(costs, alive, strict=True)]
    picks = hull_of(prices, amounts).fill(amounts, float(limits[0].most))
    selection = [int(index[pick]) for index, pick in zip(alive, picks, strict=True)]
    return selection if feasible(selection, limits) else None


def _not_worse_than(alive: list[Indices], costs: Sequence[Numbers], value: float) -> list[Indices]:
    """Drops choices that cost more than a known selection even if all other groups take their cheapest."""
    cheapest = [c[i].min() for c, i in zip(costs, alive, strict=True)]
    room = (value - exact_sum(cheapest)) + ARITHMETIC * abs(value)
    return [i[c[i] - low <= room] for c, i, low in zip(costs, alive, cheapest, strict=True)]


def _scale(
    costs: Sequence[Numbers], alive: list[Indices], incumbent: list[int] | None, program: Program
) -> float:
    """A scale at which HiGHS's tolerances are negligible."""
    if integral(costs):
        extra = np.concatenate([c[i] - c[i].min() for c, i in zip(costs, alive, strict=True)])
        return 1.0 / (int(np.gcd.reduce(extra)) or 1)
    if incumbent is not None:
        size = _excess(costs, alive, incumbent)
    else:
        size = sum(float(np.median(c[i] - c[i].min())) for c, i in zip(costs, alive, strict=True))
        if size > 0:
            size = program.relaxed(SCALED_OPTIMUM / size) or size
    return SCALED_OPTIMUM / size if size > 0 else 1.0


def _excess(costs: Sequence[Numbers], alive: list[Indices], selection: Sequence[int]) -> float:
    """Cost above the cheapest choice of every group."""
    return float(exact_sum([c[s] - c[i].min() for c, i, s in zip(costs, alive, selection, strict=True)]))


def _relative_gap(value: float, bound: float, step: float) -> float:
    """Integer costs come in steps: a bound less than one step below the value proves it."""
    distance = max(0.0, value - bound)
    if distance < 0.99 * step:
        return 0.0
    relative = distance / abs(value) if value else 0.0
    return 0.0 if relative < ARITHMETIC else relative
