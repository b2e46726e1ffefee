"""Pareto-optimal plans in bytes, predicted KL and seconds per token.

The complete frontier would be too large. So this samples it: some sizes from the frontier of bytes and KL, and for each
several speeds from the fastest plan of that size to its best. Each point is an exact optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kl_lens.errors import PlanError
from kl_lens.planning.budget import solve
from kl_lens.planning.frontier import pareto_frontier
from kl_lens.planning.pareto import undominated
from kl_lens.planning.problem import Problem

_ROUNDING = 1e-9  # relative slack for a limit that a plan reaches exactly


@dataclass(frozen=True)
class SurfacePoint:
    bytes: int
    kl: float
    seconds: float
    selection: tuple[int, ...]  # choice of each group of the problem


def pareto_surface(problem: Problem, *, sizes: int = 10, speeds: int = 4) -> list[SurfacePoint]:
    """Sorted by size, then fastest first."""
    if not problem.has_latency:
        raise PlanError(
            "speeds need a latency profile of the target; make one with: kl-lens benchmark --layers"
        )
    points: dict[tuple[int, ...], SurfacePoint] = {}

    def keep(selection: tuple[int, ...]) -> float:
        totals = problem.totals(selection)
        points[selection] = SurfacePoint(totals.bytes, totals.kl, totals.seconds, selection)
        return totals.seconds

    for best in pareto_frontier(problem).thinned(sizes):
        slow = keep(best.selection)
        fastest, _ = solve(problem, "latency", {"bytes": best.bytes})
        for limit in np.linspace(problem.totals(fastest).seconds, slow, speeds)[:-1]:
            limits = {"bytes": best.bytes, "latency": float(limit) * (1 + _ROUNDING)}
            keep(tuple(solve(problem, "kl", limits)[0]))
    every = list(points.values())
    kept = undominated(*(np.array([getattr(p, name) for p in every]) for name in ("bytes", "kl", "seconds")))
    return sorted((every[i] for i in kept), key=lambda point: (point.bytes, point.seconds))
