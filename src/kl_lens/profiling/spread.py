"""Summaries of repeated timings, ratios with a shared noise, and whether a ratio may be shown.

Whatever disturbs a token makes it slower, never faster. So a turn of a few tokens counts as its fastest one, and a file
as the low quantile of its turns. The interval of a ratio is a bootstrap over turns: both files are drawn together,
because disturbances longer than a turn affect both. It is widened to include the ratio of the very fastest turns: if
those differ much from the low quantile, most turns were disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kl_lens.run.records import Profile, Quartiles

LOW = 0.1  # quantile of turns that represents a file
CONFIDENCE, DRAWS = 0.95, 1000
FEWEST_TURNS = 5
WIDEST = 1.5  # a ratio of the ends above this says nothing
NOTICED = 0.05  # share of processor time worth reporting
# Requested processors over existing ones. Above this, threads that wait for each other are descheduled in every token,
# and no statistic helps: llama.cpp with two threads next to two busy processes took 76 ms per token in every format;
# with one thread it took 3.9 ms, and was 1.4 times as fast in 4 or 8 bits.
CROWDED = 1.3


def spread_of(values: Sequence[float]) -> Quartiles:
    """Median and quartiles (linear interpolation)."""
    low, median, high = (float(v) for v in np.percentile(np.asarray(values, np.float64), (25, 50, 75)))
    return Quartiles(median, low, high, len(values))


def compared(seconds: Sequence[float], base: Sequence[float]) -> Quartiles | None:
    """Speed relative to the base with its 95 % interval, from seconds of the same turns; None if there are too few."""
    turns = min(len(base), len(seconds))
    times = np.array([base[:turns], seconds[:turns]], np.float64)
    if turns < FEWEST_TURNS:
        return None
    drawn = times[:, np.random.default_rng(0).integers(0, turns, (DRAWS, turns))]  # (2, draws, turns)
    above, below = np.quantile(drawn, LOW, axis=-1)
    tail = (1 - CONFIDENCE) / 2
    quickest = times[0].min() / times[1].min()
    ends = *np.quantile(above / below, (tail, 1 - tail)), quickest
    above, below = np.quantile(times, LOW, axis=-1)
    return Quartiles(float(above / below), float(min(ends)), float(max(ends)), turns)


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the FP16 file, or why it cannot be measured."""

    spread: Quartiles | None  # None: too few turns
    obstacle: str | None = None  # why it may not be shown

    @property
    def brief(self) -> str:
        if self.obstacle or self.spread is None:
            return "not measurable"
        low, median, high = (f"{v:.2f}" for v in (self.spread.low, self.spread.median, self.spread.high))
        return median if low == high else f"{median} ({low}–{high})"

    @property
    def words(self) -> str:
        return f"not measurable here: {self.obstacle}" if self.obstacle else self.brief

    def to_json(self) -> dict[str, object]:
        """As shown: without a median if the interval says nothing."""
        told: dict[str, object] = {} if self.spread is None else self.spread.to_json()
        if self.obstacle:
            told.pop("median", None)
            told["not_measurable"] = self.obstacle
        return told


def ratio_of(profile: Profile, timing: str) -> Ratio:
    """Decides whether a ratio is shown; used by screen, tables, report and JSON."""
    spread = profile.ratios.get(timing)
    if spread is None:
        return Ratio(None, "too few turns; raise --repeats or --new-tokens")
    asked, stolen, others = (profile.load.get(name, 0.0) for name in ("asked", "stolen", "others"))
    is_exact = spread.low == spread.high  # the base itself, or a tool without intervals
    if is_exact or (spread.high <= WIDEST * spread.low and asked + stolen + others <= CROWDED):
        return Ratio(spread)
    share = ""
    if max(stolen, others) >= NOTICED:
        share = f" ({stolen:.0%} stolen)" if stolen >= NOTICED else f" ({others:.0%} used by others)"
    return Ratio(spread, "the machine was busy" + share.replace("%", " %"))
