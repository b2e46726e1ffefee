"""A 5-gram language model with interpolated modified Kneser-Ney smoothing: the yardstick.

Token ids fit in 12 bits, so a 5-gram is one 64-bit integer, and counting is sorting. Discounts
are the usual closed forms from the counts of counts (Chen and Goodman 1999), three per order.
"""

from __future__ import annotations

import numpy as np

ORDER = 5
BITS = 12


def pack(ids: np.ndarray, order: int) -> np.ndarray:
    """Every window of ``order`` tokens as one integer, the oldest token in the highest bits."""
    count = len(ids) - order + 1
    packed = np.zeros(count, dtype=np.int64)
    for offset in range(order):
        packed = (packed << BITS) | ids[offset : offset + count].astype(np.int64)
    return packed


class _Level:
    """The n-grams of one order with their (continuation) counts, and sums per context."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray) -> None:
        self.grams = grams
        self.counts = counts
        self.discounts = _discounts(counts)
        context = grams >> BITS
        self.contexts, first = np.unique(context, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        # How much mass each context gives up: one discount per n-gram it has seen.
        self.freed = np.add.reduceat(self.discounts[np.minimum(counts, 3)], first)

    def interpolate(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """p(last | context) for each packed n-gram, given the probabilities one order below."""
        at, known = _find(self.grams, grams)
        count = np.where(known, self.counts[at], 0)
        row, seen = _find(self.contexts, grams >> BITS)
        total = np.where(seen, self.totals[row], 1)
        direct = np.maximum(count - self.discounts[np.minimum(count, 3)], 0) / total
        backoff = np.where(seen, self.freed[row] / total, 1.0)
        return direct + backoff * lower


class KneserNey:
    """Trained on one stream of token ids."""

    def __init__(self, ids: np.ndarray, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.levels: list[_Level] = []
        grams, counts = np.unique(pack(ids, ORDER), return_counts=True)
        for order in range(ORDER, 0, -1):
            self.levels.append(_Level(grams, counts))
            if (
                order > 1
            ):  # below the top, count the distinct tokens that precede an n-gram
                suffix = grams & ((1 << (BITS * (order - 1))) - 1)
                grams, counts = np.unique(suffix, return_counts=True)
        self.levels.reverse()

    def log_probabilities(self, ids: np.ndarray) -> np.ndarray:
        """ln p of every token of ``ids`` from the fifth on, each given the four before it."""
        windows = pack(ids, ORDER)
        probability = np.full(len(windows), 1.0 / self.vocabulary)
        for order, level in enumerate(self.levels, start=1):
            probability = level.interpolate(
                windows & ((1 << (BITS * order)) - 1), probability
            )
        return np.log(probability)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """What an n-gram seen 0, 1, 2, or 3 and more times gives up."""
    ones, twos, threes, fours = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    if not (
        ones and twos and threes
    ):  # a level so full that the closed forms are undefined
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = ones / (ones + 2 * twos)
    return np.array(
        [
            0.0,
            1 - 2 * y * twos / ones,
            2 - 3 * y * threes / twos,
            3 - 4 * y * fours / threes,
        ]
    )


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of keys in a sorted table, and whether each is there."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def perplexity(training: np.ndarray, test: np.ndarray, vocabulary: int) -> float:
    """Token perplexity of a 5-gram trained on one stream and read on another."""
    return float(np.exp(-KneserNey(training, vocabulary).log_probabilities(test).mean()))
