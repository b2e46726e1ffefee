"""The Pareto frontier of bytes and predicted KL: the answer for every budget at once.

Built by dynamic programming: group by group, all sums of choices, without those that another beats in both bytes and
KL. This is exact, but the number of sums may explode. Above `most_points` states, states with nearly equal KL are
merged into the smallest of them. The product of the merging factors is kept in `within`: no plan of the same size or
smaller has a KL below the frontier's divided by `within`. `within == 1`: nothing was merged and the frontier is
complete.

Corners of the lower convex hull are always exact and always on the frontier; the lines between them bound the KL of
every plan from below. `plan_for_budget` proves the optimum of one budget.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import BudgetError
from kl_lens.base.units import human_bytes
from kl_lens.planning.hull import Hull, hull_of
from kl_lens.planning.pareto import undominated
from kl_lens.planning.predict import finished_plan
from kl_lens.planning.problem import Problem
from kl_lens.run.records import Plan, SensitivityTable

MOST_POINTS = 30_000


@dataclass(frozen=True)
class FrontierPoint:
    bytes: int
    kl: float
    selection: tuple[int, ...]  # choice of each group of the problem


@dataclass(frozen=True)
class Frontier:
    """Plans that no other beats in both bytes and predicted KL, smallest first."""

    problem: Problem
    sizes: npt.NDArray[np.int64]  # increasing
    kls: npt.NDArray[np.float64]  # decreasing
    within: float  # 1.0: complete; else see the module's docstring
    _trail: _Trail
    _hull: Hull

    @property
    def complete(self) -> bool:
        return self.within == 1.0

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> FrontierPoint:
        index = range(len(self))[index]
        return FrontierPoint(int(self.sizes[index]), float(self.kls[index]), self._trail.selection(index))

    def __iter__(self) -> Iterator[FrontierPoint]:
        return (self[i] for i in range(len(self)))

    def at_bytes(self, max_bytes: float) -> FrontierPoint:
        """The point with the lowest KL within a size."""
        index = bisect.bisect_right(self.sizes.tolist(), max_bytes) - 1
        if index < 0:
            raise BudgetError(
                f"{human_bytes(max_bytes)} cannot be met: the frontier goes from {human_bytes(int(self.sizes[0]))} "
                f"to {human_bytes(int(self.sizes[-1]))}; raise the budget"
            )
        return self[index]

    def least_possible_kl(self, max_bytes: float) -> float:
        """A lower bound on the KL of any plan of this size (the convex hull)."""
        return self._hull.bound(max_bytes - self.problem.fixed_bytes)

    def thinned(self, points: int) -> list[FrontierPoint]:
        """Some points for a figure, evenly spread over the bytes, with both ends."""
        if len(self) <= points:
            return list(self)
        wanted = np.linspace(self.sizes[0], self.sizes[-1], points)
        indices = np.unique(np.searchsorted(self.sizes, wanted, side="right") - 1)
        return [self[int(i)] for i in indices]

    def plan(self, point: FrontierPoint, table: SensitivityTable, name: str) -> Plan:
        notes: dict[str, object] = {"frontier_within": self.within}
        return finished_plan(
            table,
            name,
            self.problem.assignment(point.selection),
            "Pareto frontier of bytes and KL",
            notes,
            family="exact",
        )


class _Trail:
    """The choice and the previous state of each state, to trace a point's selection."""

    def __init__(self, order: npt.NDArray[np.intp]) -> None:
        self.order = order
        self.parents: list[npt.NDArray[np.int32]] = []
        self.picks: list[npt.NDArray[np.int16]] = []
        self.known: dict[int, tuple[int, ...]] = {}  # points that came from the hull
        self.states: npt.NDArray[np.int64] = np.zeros(1, np.int64)  # point → state of the last stage

    def selection(self, index: int) -> tuple[int, ...]:
        if index in self.known:
            return self.known[index]
        selection = [0] * len(self.order)
        state = int(self.states[index])
        for stage in reversed(range(len(self.order))):
            selection[int(self.order[stage])] = int(self.picks[stage][state])
            state = int(self.parents[stage][state])
        return tuple(selection)


def pareto_frontier(problem: Problem, most_points: int = MOST_POINTS) -> Frontier:
    """The Pareto-optimal (bytes, predicted KL), complete or to within a stated factor."""
    sizes_of = [np.array([c.bytes for c in g.choices], dtype=np.int64) for g in problem.groups]
    kls_of = [np.array([c.kl for c in g.choices], dtype=np.float64) for g in problem.groups]
    # Groups of equal shape in a row: their sums coincide in bytes, which removes most states.
    keys = [tuple(sizes.tolist()) for sizes in sizes_of]
    order = np.array(sorted(range(len(keys)), key=lambda g: (len(keys[g]), keys[g])), dtype=np.intp)
    trail = _Trail(order)
    sizes, kls = np.array([problem.fixed_bytes], dtype=np.int64), np.zeros(1)
    within, factor = 1.0, 1e-9
    for group in order:
        choices = len(sizes_of[group])
        all_sizes = (sizes[:, None] + sizes_of[group]).ravel()
        all_kls = (kls[:, None] + kls_of[group]).ravel()
        kept = undominated(all_sizes, all_kls)
        if len(kept) > max(most_points, 2):
            kept, factor = _merged(kept, all_kls, most_points, factor)
            within *= 1 + factor
        trail.parents.append((kept // choices).astype(np.int32))
        trail.picks.append((kept % choices).astype(np.int16))
        sizes, kls = all_sizes[kept], all_kls[kept]
    hull = hull_of(kls_of, [s.astype(np.float64) for s in sizes_of])
    sizes, kls = _with_corners(problem, hull, sizes, kls, trail)
    return Frontier(problem, sizes, kls, within, trail, hull)


def _merged(
    kept: npt.NDArray[np.intp], kls: npt.NDArray[np.float64], most: int, factor: float
) -> tuple[npt.NDArray[np.intp], float]:
    """Keeps the smallest state of each bucket of KLs within 1 + factor of each other."""
    with np.errstate(divide="ignore"):
        logs = np.log(kls[kept])  # decreasing; −inf for a KL of zero, which gets its own bucket
    while True:
        buckets = np.floor((logs[0] - logs) / np.log1p(factor))
        first = np.ones(len(kept), dtype=bool)
        first[1:] = buckets[1:] != buckets[:-1]
        if np.count_nonzero(first) <= max(most, 2):
            return kept[first], factor
        factor *= 1.25


def _with_corners(
    problem: Problem, hull: Hull, sizes: npt.NDArray[np.int64], kls: npt.NDArray[np.float64], trail: _Trail
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Adds the hull's corners again, which are exact, in case merging removed them."""
    corners = [hull.selection(step) for step in range(len(hull.steps) + 1)]
    totals = [problem.totals(selection) for selection in corners]
    all_sizes = np.concatenate([sizes, np.array([t.bytes for t in totals], dtype=np.int64)])
    all_kls = np.concatenate([kls, np.array([t.kl for t in totals])])
    kept = undominated(all_sizes, all_kls)
    trail.states = kept.astype(np.int64)
    trail.known = {
        place: tuple(corners[state - len(sizes)]) for place, state in enumerate(kept) if state >= len(sizes)
    }
    return all_sizes[kept], all_kls[kept]
