"""Pareto-optimal elements: those that no other beats in every respect."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]


def undominated(*quantities: Numbers) -> npt.NDArray[np.intp]:
    """Indices of elements that no other beats or equals in every quantity; of equals, the first is kept.

    With two quantities the result is sorted by the first, increasing. More quantities are compared pair by pair, which
    suits only few elements.
    """
    if len(quantities) == 2:
        first, second = quantities
        order = np.lexsort((second, first))
        if not len(order):
            return order
        best_so_far = np.minimum.accumulate(second[order])
        return order[np.concatenate([[True], best_so_far[1:] < best_so_far[:-1]])]
    rows = np.stack(quantities, axis=1)
    no_worse = (rows[None, :, :] <= rows[:, None, :]).all(axis=2)  # [i, j]: j is not worse than i
    place = np.arange(len(rows))
    beaten = no_worse & (~no_worse.T | (place[None, :] < place[:, None]))
    np.fill_diagonal(beaten, False)
    return np.flatnonzero(~beaten.any(axis=1))
