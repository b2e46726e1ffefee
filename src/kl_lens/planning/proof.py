"""A second, independent proof of optimality for knapsacks with one limit.

HiGHS accepts variables that are integer to within 1e-6, so its bound can be slightly below the true optimum. Given a
selection, this searches exactly for anything better: dynamic programming over the groups that keeps only partial sums
whose convex bound is below the known value. If that value is (nearly) optimal, few remain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kl_lens.planning.hull import Array, hull_of, sums_from_the_end
from kl_lens.planning.pareto import undominated

Indices = npt.NDArray[np.intp]

MOST_STATES = 300_000


def better_selection(
    costs: Sequence[Array], amounts: Sequence[Array], most: float, value: float, improvement: float
) -> tuple[bool, list[int] | None]:
    """(whether the search finished, a selection cheaper than `value` by at least `improvement` or None).

    (True, None) proves that no selection within `most` is cheaper. Whole numbers up to 2^53 are exact.
    """
    groups = len(costs)
    target = value - improvement
    total_amount, total_cost = np.zeros(1), np.zeros(1)
    trail: list[tuple[Indices, Indices]] = []
    hulls = _hulls_of_the_rest(costs, amounts)
    for group in range(groups):
        rest_amounts, rest_costs = hulls[group]
        all_amounts = (total_amount[:, None] + amounts[group]).ravel()
        all_costs = (total_cost[:, None] + costs[group]).ravel()
        room = most - all_amounts
        bound = all_costs + np.interp(room, rest_amounts, rest_costs)
        # Rounding in the bound must never discard a true improvement.
        slack = 1e-12 * (abs(value) + np.abs(bound))
        alive = np.flatnonzero((room >= rest_amounts[0] - 1e-12 * abs(most)) & (bound <= target + slack))
        order = alive[undominated(all_amounts[alive], all_costs[alive])]
        if len(order) == 0:
            return True, None
        if len(order) > MOST_STATES:
            return False, None
        choices = len(costs[group])
        trail.append((order // choices, order % choices))
        total_amount, total_cost = all_amounts[order], all_costs[order]
    winner = int(np.argmin(total_cost))
    if total_cost[winner] > target:
        return True, None
    selection: list[int] = []
    for parents, picks in reversed(trail):
        selection.append(int(picks[winner]))
        winner = int(parents[winner])
    return True, selection[::-1]


def _hulls_of_the_rest(costs: Sequence[Array], amounts: Sequence[Array]) -> list[tuple[Array, Array]]:
    """For each group, the convex hull of all later groups."""
    whole = hull_of(costs, amounts)
    owner = np.array([group for group, _ in whole.steps], dtype=np.intp)
    extra_amounts, extra_costs = whole.step_amounts, whole.step_costs
    least = np.array([a.min() for a in amounts])
    cheapest = np.array([c.min() for c in costs])
    hulls = []
    for group in range(len(costs)):
        behind = owner > group
        hulls.append(
            (
                np.cumsum(np.concatenate([[least[group + 1 :].sum()], extra_amounts[behind]])),
                sums_from_the_end(float(cheapest[group + 1 :].sum()), extra_costs[behind]),
            )
        )
    return hulls
