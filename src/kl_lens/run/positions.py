"""Loss by position: does it grow along the text?

A recurrent state carries its errors on, so a plan that loses little on 512 tokens may lose more after 8,000. Each
window gives a mean per bin of positions, and a slope over those bins by least squares. Windows are independent, the
tokens in one are not. So errors, also the slope's, are taken over windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.run.readings import ratio
from kl_lens.run.records import Estimate, Score

BIN = 512
FEWEST_BINS = 4
LONGEST = 8192  # tokens of a window by default, where the model allows so many
SLOPE = "slope"
GROWS = "grows"
FALLS = "falls"
STEADY = "no trend"
_CONFIDENCE = 0.975  # two-sided 95 %


@dataclass(frozen=True)
class PositionCurve:
    """Means over windows, per token."""

    starts: tuple[int, ...]  # first position of each bin
    means: tuple[Estimate, ...]  # of each bin, in nats
    slope: Estimate  # nats per 1,000 tokens
    windows: int

    @property
    def trend(self) -> str:
        """Whether the slope is above or below zero with 95 % confidence (Student's t over windows)."""
        from scipy.stats import t  # takes long to load

        if self.windows < 2:
            return STEADY
        reach = float(t.ppf(_CONFIDENCE, self.windows - 1)) * self.slope.standard_error
        return (
            GROWS
            if self.slope.value > reach
            else FALLS
            if self.slope.value < -reach
            else STEADY
        )

    def values(self, name: str) -> dict[str, Estimate]:
        """As values of a score: `kl@0`, `kl@512`, …, `kl_slope`."""
        bins = {
            f"{name}@{start}": mean
            for start, mean in zip(self.starts, self.means, strict=True)
        }
        return bins | {f"{name}_{SLOPE}": self.slope}


def curve_of(score: Score, name: str) -> PositionCurve | None:
    """What `PositionCurve.values` put into a score; None if it is not there."""
    slope = score.values.get(f"{name}_{SLOPE}")
    parts = [(key.partition("@"), mean) for key, mean in score.values.items()]
    bins = {
        int(start): mean for (kind, _, start), mean in parts if kind == name and start
    }
    if not bins or slope is None:
        return None
    return PositionCurve(
        tuple(bins), tuple(bins.values()), slope, int(score.protocol["windows"])
    )


def shown_bins(count: int) -> list[int]:
    """The bins that a narrow table shows: the first, then at double the distance each time, the last."""
    doubled = [2**power - 1 for power in range(count.bit_length())]
    return sorted({*(index for index in doubled if index < count), count - 1})


def longest_window(config: Any) -> int:
    """8,192 tokens, or as many as the model's attention allows."""
    return min(LONGEST, context_of(config) or LONGEST)


def context_of(config: Any) -> int | None:
    """Most tokens that the model's attention reads at once; None: no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None) or None


def by_position(windows: Sequence[npt.NDArray[np.floating[Any]]]) -> PositionCurve:
    """KL by position, from the KL of every token of every window. All windows have the same length. Bins have 512
    tokens, or fewer for at least four bins."""
    tokens = len(windows[0])
    starts = np.arange(0, tokens, max(1, min(BIN, math.ceil(tokens / FEWEST_BINS))))
    counts = np.diff(starts, append=tokens)
    means = (
        np.add.reduceat(np.array(windows, np.float64), starts, axis=1) / counts
    )  # (windows, bins)
    middles = (starts + counts / 2) / 1000
    away = counts * (middles - np.average(middles, weights=counts))
    slopes = means @ away / (away @ middles) if len(starts) > 1 else np.zeros(len(means))
    once = np.ones(len(means))
    mean_of_bins = tuple(ratio(column, once) for column in means.T)
    return PositionCurve(
        tuple(starts.tolist()), mean_of_bins, ratio(slopes, once), len(means)
    )
