"""The multiple-choice knapsack, solved to proven optimality with HiGHS.

Picks one choice per group so that the total cost is minimal and every limit holds. HiGHS works in floating point with
absolute tolerances of 1e-6, so its "feasible" and "optimal" can be slightly wrong. Therefore:

- choices that cannot be in the best selection are removed first;
- integer amounts are shifted and divided by their greatest common divisor, real ones scaled to the limit, and costs so
  that the optimum is large compared with the tolerances;
- every answer is added up again exactly. If it slightly breaks a limit, a cut excludes exactly this selection, and the
  solver runs again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # its parts load on first use: that takes seconds

from kl_lens.base.errors import PlanError

# Whole numbers below 2^53, or reals.
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# A bound this close to the value (relatively) is equal to it within HiGHS's precision.
ARITHMETIC = 1e-9
MOST_SECONDS = 60.0
MOST_SOLVES = 40
SCALED_OPTIMUM = 1e4  # the optimum is scaled to this; HiGHS's 1e-6 is then 1e-10 of it


@dataclass(frozen=True)
class Limit:
    """The sum of the chosen amounts, one array per group, may be at most `most`."""

    amounts: Sequence[Numbers]
    most: float

    def holds(self, selection: Sequence[int]) -> bool:
        return total(self.amounts, selection) <= self.most


@dataclass(frozen=True)
class Optimum:
    selection: list[int]
    gap: float  # relative distance to the proven bound; 0.0: proven optimal
    seconds: float


def minimise(costs: Sequence[Numbers], limits: Sequence[Limit]) -> Optimum | None:
    """The best selection, or None if no selection meets the limits."""
    started = time.perf_counter()
    alive = [
        undominated(c, *(limit.amounts[g] for limit in limits))
        for g, c in enumerate(costs)
    ]
    cheapest = [int(i[np.argmin(c[i])]) for c, i in zip(costs, alive, strict=True)]
    if all(limit.holds(cheapest) for limit in limits):
        return Optimum(cheapest, 0.0, time.perf_counter() - started)
    fitting = _within_limits(alive, limits)
    if fitting is None:
        return None
    alive = fitting
    incumbent: list[int] | None = None
    while True:
        program = _Program(costs, limits, alive)
        scale = _scale(costs, program, incumbent)
        selection, bound, stopped = program.solve(
            scale, MOST_SECONDS - (time.perf_counter() - started)
        )
        if selection is None:
            if stopped and incumbent is None:
                raise PlanError(
                    f"no plan found within {MOST_SECONDS:g} s; use fewer --formats"
                )
            if incumbent is None:
                return None
            # HiGHS ran out of time, or rejected the incumbent by a tolerance.
            selection = incumbent
        excess = _excess(costs, alive, selection)
        # If the first scale was bad, the answer gives a better one.
        if integral(costs) or stopped or excess == 0 or 1e2 <= excess * scale <= 1e8:
            step = 1 / scale if integral(costs) else 0.0
            gap = _relative_gap(total(costs, selection), bound, step)
            return Optimum(selection, gap, time.perf_counter() - started)
        incumbent = selection


def undominated(*quantities: Numbers) -> Indices:
    """Indices of elements that no other beats or equals in every quantity; of equals, the first is kept."""
    rows = np.stack(quantities, axis=1)
    # [i, j]: j is not worse than i.
    no_worse = (rows[None, :, :] <= rows[:, None, :]).all(axis=2)
    index = np.arange(len(rows))
    beaten = no_worse & (~no_worse.T | (index[None, :] < index[:, None]))
    return np.flatnonzero(~beaten.any(axis=1))


def _within_limits(alive: list[Indices], limits: Sequence[Limit]) -> list[Indices] | None:
    """Drops choices that break a limit even if all other groups take their smallest."""
    for limit in limits:
        least = [a[i].min() for a, i in zip(limit.amounts, alive, strict=True)]
        room = limit.most - math.fsum(least)
        if room < -ARITHMETIC * abs(limit.most):
            return None
        slack = room + (0 if integral(limit.amounts) else ARITHMETIC * abs(limit.most))
        alive = [
            i[a[i] - low <= slack]
            for a, i, low in zip(limit.amounts, alive, least, strict=True)
        ]
        if any(len(index) == 0 for index in alive):
            return None
    return alive


def _scale(
    costs: Sequence[Numbers], program: _Program, incumbent: list[int] | None
) -> float:
    """A scale at which HiGHS's tolerances are negligible."""
    if integral(costs):
        return 1.0 / (int(np.gcd.reduce(program.extra)) or 1)
    if incumbent is not None:
        size = _excess(costs, program.alive, incumbent)
    else:  # a guess: the answer gives a better one
        size = sum(
            float(np.median(c[i] - c[i].min()))
            for c, i in zip(costs, program.alive, strict=True)
        )
    return SCALED_OPTIMUM / size if size > 0 else 1.0


def _excess(
    costs: Sequence[Numbers], alive: Sequence[Indices], selection: Sequence[int]
) -> float:
    """Cost above the cheapest choice of every group."""
    return math.fsum(
        c[s] - c[i].min() for c, i, s in zip(costs, alive, selection, strict=True)
    )


def _relative_gap(value: float, bound: float, step: float) -> float:
    """Integer costs come in steps: a bound less than one step below the value proves it."""
    distance = max(0.0, value - bound)
    if distance < 0.99 * step:
        return 0.0
    relative = distance / abs(value) if value else 0.0
    return 0.0 if relative < ARITHMETIC else relative


class _Program:
    """The integer program over the remaining choices of each group."""

    def __init__(
        self, costs: Sequence[Numbers], limits: Sequence[Limit], alive: Sequence[Indices]
    ) -> None:
        self.limits = limits
        self.alive = alive
        self.starts = np.cumsum([0, *map(len, alive)])
        owner = np.repeat(np.arange(len(alive)), [len(index) for index in alive])
        self.base, self.extra = _above_least(costs, alive)
        count = len(self.extra)
        cells = (np.ones(count), (owner, np.arange(count)))
        choosing = scipy.sparse.csr_array(cells, shape=(len(alive), count))
        self.rows = [scipy.optimize.LinearConstraint(choosing, 1, 1)]
        self.rows += (_row(limit, alive) for limit in limits)

    def solve(self, scale: float, seconds: float) -> tuple[list[int] | None, float, bool]:
        """A selection that is feasible in exact arithmetic, a lower bound of the cost, and whether time ran out."""
        deadline = time.perf_counter() + seconds
        bound = self.base
        for _ in range(MOST_SOLVES):
            result = self._run(scale, deadline - time.perf_counter())
            if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
                bound = max(bound, self.base + result.mip_dual_bound / scale)
            stopped = result.status == 1
            if result.x is None:
                return None, bound, stopped
            shares = np.split(result.x, self.starts[1:-1])
            picks = [int(np.argmax(share)) for share in shares]
            pairs = zip(self.alive, picks, strict=True)
            selection = [int(index[pick]) for index, pick in pairs]
            if all(limit.holds(selection) for limit in self.limits):
                return selection, bound, stopped
            if stopped:
                break
            chosen = np.zeros((1, len(self.extra)))
            chosen[0, self.starts[:-1] + picks] = 1
            chosen = scipy.sparse.csr_array(chosen)
            self.rows.append(
                scipy.optimize.LinearConstraint(chosen, -np.inf, len(picks) - 1)
            )
        return None, bound, True

    def _run(self, scale: float, seconds: float) -> Any:
        with _silent_stdout():
            return scipy.optimize.milp(
                self.extra * scale,
                constraints=self.rows,
                integrality=np.ones(len(self.extra)),
                bounds=scipy.optimize.Bounds(0, 1),
                options={"mip_rel_gap": 0.0, "time_limit": max(0.1, seconds)},
            )


def _row(limit: Limit, alive: Sequence[Indices]) -> scipy.optimize.LinearConstraint:
    """One limit for HiGHS: amounts above each group's minimum, in units that suit its tolerances."""
    least, extra = _above_least(limit.amounts, alive)
    room = limit.most - least
    if integral(limit.amounts):
        unit = int(np.gcd.reduce(extra)) or 1
        room = math.floor(room) // unit
        coefficients = (extra // unit).astype(float)
        half = 0.5  # amounts are whole units: half a unit absorbs rounding and admits nothing
    else:
        # Keep the unit above the limit's rounding error and above the smallest float.
        unit_size = max(room / 1e6, abs(limit.most) * 1e-15, 1e-290)
        coefficients = extra / unit_size
        room = room / unit_size
        half = 1e-6
    row = scipy.sparse.csr_array(coefficients.reshape(1, -1))
    return scipy.optimize.LinearConstraint(row, -np.inf, room + half)


def _above_least(
    amounts: Sequence[Numbers], alive: Sequence[Indices]
) -> tuple[float, Numbers]:
    """The sum of the smallest amounts of all groups, and by how much each choice is above its group's smallest."""
    parts = [a[i] for a, i in zip(amounts, alive, strict=True)]
    extra = np.concatenate([part - part.min() for part in parts])
    return math.fsum(part.min() for part in parts), extra


def total(amounts: Sequence[Numbers], selection: Sequence[int]) -> float:
    """Exact for whole numbers, correctly rounded for others."""
    return math.fsum(a[s] for a, s in zip(amounts, selection, strict=True))


def integral(amounts: Sequence[Numbers]) -> bool:
    return all(np.issubdtype(a.dtype, np.integer) for a in amounts)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS sometimes prints a debugging line from C, which would end up in `--json` output."""
    try:
        flush = ctypes.CDLL(None).fflush
        flush(None)
        saved = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except (OSError, TypeError, AttributeError):
        # No C library of this kind, or no standard output.
        yield
        return
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hull:
    """The lower convex hull of all plans: provably optimal points. With a price per unit instead of the budget
    (Lagrange), each group can be solved alone; what is best for some price is a corner of the hull.

    Starts with the smallest amount in every group, then takes the steps in order, best gain per unit first."""

    start: tuple[int, ...]  # choice of each group at the smallest amount
    steps: tuple[tuple[int, int], ...]  # (group, choice it changes to)
    amounts: Array  # total amount at the start and after each step
    costs: Array  # total cost likewise; decreasing and convex

    def selection(self, step: int) -> list[int]:
        """The selection after that many steps: an exact optimum at its own amount."""
        selection = list(self.start)
        for group, choice in self.steps[:step]:
            selection[group] = choice
        return selection


def hull_of(costs: Sequence[Array], amounts: Sequence[Array]) -> Hull:
    """The hull of all sums: the steps of all groups sorted by slope."""
    start: list[int] = []
    # Slope, group, choice, extra amount, extra cost.
    steps: list[tuple[float, int, int, float, float]] = []
    for group, (cost, amount) in enumerate(zip(costs, amounts, strict=True)):
        corners = _corners(cost, amount)
        start.append(corners[0])
        for before, after in pairwise(corners):
            extra = float(amount[after] - amount[before])
            change = float(cost[after] - cost[before])
            steps.append((change / extra, group, after, extra, change))
    steps.sort(key=lambda step: step[:2])  # stable: the steps of one group stay in order
    first_amount = sum(float(a[i]) for a, i in zip(amounts, start, strict=True))
    last_cost = math.fsum(float(c.min()) for c in costs)
    return Hull(
        start=tuple(start),
        steps=tuple((group, choice) for _, group, choice, _, _ in steps),
        amounts=np.cumsum([first_amount, *(step[3] for step in steps)]),
        # Adding from the small end keeps small values exact.
        costs=np.cumsum([last_cost, *(-step[4] for step in reversed(steps))])[::-1],
    )


def _corners(cost: Array, amount: Array) -> list[int]:
    """Choices on a group's lower convex hull, from the smallest amount to the lowest cost."""
    order = np.lexsort((cost, amount))
    corners: list[int] = []
    for i in order:
        if corners and cost[i] >= cost[corners[-1]]:
            continue  # dominated: larger and not cheaper
        while len(corners) > 1:
            a, b = corners[-2:]
            past = (cost[b] - cost[a]) * (amount[i] - amount[a])
            if past < (cost[i] - cost[a]) * (amount[b] - amount[a]):
                break
            corners.pop()
        corners.append(int(i))
    return corners
