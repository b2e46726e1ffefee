"""Is the ranking settled, or would other windows give another one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAPS = 200


@dataclass(frozen=True)
class Settled:
    """Agreement of the ranking with itself, for the format where it is worst.

    `between_halves` is Kendall's τ between the rankings by the even and by the odd windows; `lower` is the 2.5 %
    quantile of τ between the ranking and those of a bootstrap over windows.
    """

    format: str
    between_halves: float
    lower: float
    threshold: float

    @property
    def is_settled(self) -> bool:
        return min(self.between_halves, self.lower) >= self.threshold

    def __str__(self) -> str:
        word = "settled" if self.is_settled else "not settled"
        return (
            f"{word} ({self.format}: τ between halves {self.between_halves:.3f}, "
            f"bootstrap lower bound {self.lower:.3f}, threshold {self.threshold:g})"
        )


def settled(values: Mapping[str, Sequence[Sequence[float]]], threshold: float) -> Settled:
    """values: per format, (candidates × windows) of KL."""
    from scipy.stats import kendalltau  # takes seconds to load, in every worker too

    states = []
    for name, rows in values.items():
        matrix = np.asarray(rows, float)
        if matrix.shape[0] < 2 or matrix.shape[1] < 2:
            states.append(Settled(name, float("nan"), float("-inf"), threshold))
            continue
        halves = float(kendalltau(matrix[:, ::2].mean(1), matrix[:, 1::2].mean(1)).statistic)
        random = np.random.default_rng(0)
        whole = matrix.mean(1)
        drawn = [
            kendalltau(
                whole, matrix[:, random.integers(0, matrix.shape[1], matrix.shape[1])].mean(1)
            ).statistic
            for _ in range(BOOTSTRAPS)
        ]
        states.append(Settled(name, halves, float(np.quantile(drawn, 0.025)), threshold))
    return min(states, key=lambda s: min(s.between_halves, s.lower) if s.lower > float("-inf") else s.lower)
