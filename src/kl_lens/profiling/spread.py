"""Repeated timings in few numbers, and ratios that share their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kl_lens.records import Quartiles

# Timings for which more is better; of all others, less is.
_RATES = ("_per_second", "throughput")

Rounds = Sequence[Mapping[str, float]]  # one mapping of timings per round


def spread_of(values: Sequence[float]) -> Quartiles:
    """Median and quartiles (linear between the values, as numpy does)."""
    low, median, high = (float(v) for v in np.percentile(np.asarray(values, np.float64), (25, 50, 75)))
    return Quartiles(median, low, high, len(values))


def spreads(rounds: Rounds) -> dict[str, Quartiles]:
    return {name: spread_of([r[name] for r in rounds]) for name in rounds[0]} if rounds else {}


def ratio(name: str, value: float, base: float) -> float:
    """How many times better than the base; 1 is the same, 2 twice as fast."""
    is_rate = any(mark in name for mark in _RATES)
    return value / base if is_rate else base / value


def ratios(rounds: Rounds, base: Rounds) -> dict[str, Quartiles]:
    """The ratio of each round to the base in the same round, then their median and quartiles.

    Whatever disturbed the machine in a round disturbed both sides of its ratio, so this is steadier than the ratio
    of two medians.
    """
    pairs = list(zip(rounds, base, strict=False))
    if not pairs:
        return {}
    names = [name for name in pairs[0][0] if name in pairs[0][1]]
    return {name: spread_of([ratio(name, a[name], b[name]) for a, b in pairs]) for name in names}
