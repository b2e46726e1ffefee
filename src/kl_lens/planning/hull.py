"""The lower convex hull of a multiple-choice knapsack: provably optimal points.

With a price per unit instead of the budget (Lagrange), each group can be solved alone. The selections that are best for
some price are the corners of the lower convex hull of all plans. Each is the exact optimum at its own amount.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hull:
    """Starts with the smallest amount in every group, then takes the steps in order, best gain per unit first."""

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

    def fill(self, amounts: Sequence[Array], limit: float) -> list[int]:
        """A feasible selection near the optimum: takes the steps that still fit."""
        selection = list(self.start)
        total = float(self.amounts[0])
        blocked: set[int] = set()
        for group, choice in self.steps:
            if group in blocked:
                continue
            extra = float(amounts[group][choice] - amounts[group][selection[group]])
            if total + extra <= limit:
                selection[group] = choice
                total += extra
            else:
                blocked.add(group)
        return selection


def hull_of(costs: Sequence[Array], amounts: Sequence[Array]) -> Hull:
    """The hull of all sums: the steps of all groups sorted by slope."""
    start: list[int] = []
    steps: list[tuple[float, int, int, float, float]] = []  # slope, group, choice, extra amount, extra cost
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
            a, b = corners[-2], corners[-1]
            if (cost[b] - cost[a]) * (amount[i] - amount[a]) < (cost[i] - cost[a]) * (amount[b] - amount[a]):
                break
            corners.pop()
        corners.append(int(i))
    return corners
