"""Runs HiGHS so that its answers hold in exact arithmetic.

HiGHS works in floating point with absolute tolerances of 1e-6, so "feasible" and "optimal" can be slightly wrong:

- integer amounts are shifted and divided by their greatest common divisor, real ones scaled to the limit;
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
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # its parts load on first use: that takes seconds

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

MOST_SOLVES = 40


@dataclass(frozen=True)
class Limit:
    """The sum of the chosen amounts, one array per group, may be at most `most`."""

    amounts: Sequence[Numbers]
    most: float


@dataclass
class Answer:
    selection: list[int] | None
    bound: float  # proven lower bound of the total cost
    stopped: bool  # out of time, or out of solves
    solves: int


class Program:
    """The integer program over the remaining choices of each group."""

    def __init__(self, costs: Sequence[Numbers], limits: Sequence[Limit], alive: Sequence[Indices]) -> None:
        self.limits, self.alive = limits, alive
        self.sizes = [len(index) for index in alive]
        self.offsets = np.cumsum([0, *self.sizes[:-1]])
        self.variables = sum(self.sizes)
        owner = np.repeat(np.arange(len(alive)), self.sizes)
        self.base = exact_sum([c[i].min() for c, i in zip(costs, alive, strict=True)])
        self.extra = np.concatenate([c[i] - c[i].min() for c, i in zip(costs, alive, strict=True)])
        shape = (len(alive), self.variables)
        one_each = scipy.sparse.csr_array(
            (np.ones(self.variables), (owner, np.arange(self.variables))), shape=shape
        )
        self.rows = [
            scipy.optimize.LinearConstraint(one_each, 1, 1),
            *(_row(limit, alive) for limit in limits),
        ]

    def relaxed(self, scale: float) -> float:
        """Cost above the cheapest choices in the linear relaxation: a rough size of the optimum."""
        result = self._run(scale, integer=False, seconds=60.0)
        return float(result.fun) / scale if result.fun is not None else 0.0

    def solve(self, scale: float, seconds: float) -> Answer:
        """Runs HiGHS until its answer is feasible in exact arithmetic."""
        deadline = time.perf_counter() + seconds
        bound = self.base
        for solves in range(1, MOST_SOLVES + 1):
            result = self._run(scale, integer=True, seconds=deadline - time.perf_counter())
            if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
                bound = max(bound, self.base + result.mip_dual_bound / scale)
            stopped = result.status == 1
            if result.x is None:
                return Answer(None, bound, stopped, solves)
            picks = [
                int(np.argmax(result.x[o : o + n])) for o, n in zip(self.offsets, self.sizes, strict=True)
            ]
            selection = [int(index[pick]) for index, pick in zip(self.alive, picks, strict=True)]
            if feasible(selection, self.limits):
                return Answer(selection, bound, stopped, solves)
            if stopped:
                break
            self._forbid(picks)
        return Answer(None, bound, True, solves)

    def _run(self, scale: float, *, integer: bool, seconds: float) -> Any:
        options = {"mip_rel_gap": 0.0, "time_limit": max(0.1, seconds)}
        with _silent_stdout():
            return scipy.optimize.milp(
                self.extra * scale,
                constraints=self.rows,
                integrality=np.full(self.variables, int(integer)),
                bounds=scipy.optimize.Bounds(0, 1),
                options=options,
            )

    def _forbid(self, picks: Sequence[int]) -> None:
        chosen = np.zeros((1, self.variables))
        chosen[0, self.offsets + np.array(picks)] = 1
        self.rows.append(
            scipy.optimize.LinearConstraint(scipy.sparse.csr_array(chosen), -np.inf, len(picks) - 1)
        )


def _row(limit: Limit, alive: Sequence[Indices]) -> scipy.optimize.LinearConstraint:
    """One limit for HiGHS: amounts above each group's minimum, in units that suit its tolerances."""
    least = [a[i].min() for a, i in zip(limit.amounts, alive, strict=True)]
    extra = np.concatenate([a[i] - low for a, i, low in zip(limit.amounts, alive, least, strict=True)])
    room = limit.most - exact_sum(least)
    if integral(limit.amounts):
        unit = int(np.gcd.reduce(extra)) or 1
        room = math.floor(room) // unit
        coefficients = (extra // unit).astype(float)
        half = 0.5  # amounts are whole units: half a unit absorbs rounding and admits nothing
    else:
        # Keep the unit above the limit's rounding error and above the smallest float.
        unit_size = max(room / 1e6, abs(limit.most) * 1e-15, 1e-290)
        coefficients, room, half = extra / unit_size, room / unit_size, 1e-6
    return scipy.optimize.LinearConstraint(
        scipy.sparse.csr_array(coefficients.reshape(1, -1)), -np.inf, room + half
    )


def feasible(selection: Sequence[int], limits: Sequence[Limit]) -> bool:
    return all(total(limit.amounts, selection) <= limit.most for limit in limits)


def total(amounts: Sequence[Numbers], selection: Sequence[int]) -> float:
    return exact_sum([a[s] for a, s in zip(amounts, selection, strict=True)])


def exact_sum(values: Sequence[np.int64 | np.float64]) -> float:
    """Exact for integers, correctly rounded for floats."""
    if all(isinstance(v, np.integer) for v in values):
        return sum(int(v) for v in values)
    return math.fsum(float(v) for v in values)


def integral(amounts: Sequence[Numbers]) -> bool:
    return all(np.issubdtype(a.dtype, np.integer) for a in amounts)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS sometimes prints a debugging line from C, which would end up in `--json` output."""
    try:
        flush = ctypes.CDLL(None).fflush
        flush(None)
        saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except (OSError, TypeError, AttributeError):  # no C library of this kind, or no standard output
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
