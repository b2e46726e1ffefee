"""What the journal stores per window, and how reported numbers are computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.run.records import Estimate, Score

# What a stored number means. Raise it, with a dated reason, whenever a metric's definition changes.
# 1 (2026-11-15): first version.
METRICS_VERSION = 1

KL = "kl_teacher_to_student"
_BUILT_IN = (
    KL,
    "kl_student_to_teacher",
    "squared_error",
    "signal",
    "delta_cross_entropy",
    "same_top",
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WindowMetrics:
    """Sums over the tokens of one window; every reported number is computed from them."""

    window: int
    tokens: int  # rows compared
    targets: int  # rows that have a true next token
    sums: Mapping[
        str, float
    ]  # name → sum over tokens; of squares: the mean over the vocabulary
    token_kl: bytes  # KL(teacher ‖ student) of every token, float32

    @property
    def kl(self) -> float:
        """Σ KL(teacher ‖ student)."""
        return self.sums[KL]


def window_kl(windows: Sequence[WindowMetrics]) -> Floats:
    """Mean KL(teacher ‖ student) per token of each window."""
    return np.array([w.kl / w.tokens for w in windows])


def summarise(windows: Sequence[WindowMetrics]) -> dict[str, Estimate]:
    """Means per token with standard errors over windows: the metrics of a Measurement, and other objectives that all
    windows have. KL in nats; the teacher is the original model."""
    if not windows:
        raise ValueError("no windows to summarise")
    tokens = np.array([w.tokens for w in windows], float)
    targets = np.array([w.targets for w in windows], float)

    def mean(name: str, weight: Floats = tokens) -> Estimate:
        return ratio(np.array([w.sums[name] for w in windows]), weight)

    error = mean("squared_error")
    signal = mean("signal")
    token_kl = np.concatenate([np.frombuffer(w.token_kl, np.float32) for w in windows])
    others = [
        n
        for n in windows[0].sums
        if n not in _BUILT_IN and all(n in w.sums for w in windows)
    ]
    return {
        KL: mean(KL),
        "kl_student_to_teacher": mean("kl_student_to_teacher"),
        "mse": error,  # of the logits
        "sqnr_db": _decibels(signal, error, windows),  # of the logits; larger is better
        "delta_cross_entropy": mean(
            "delta_cross_entropy", targets
        ),  # against the true next token
        "same_top": mean(
            "same_top"
        ),  # share of tokens whose most likely next token stays the same
        "kl_p99": Estimate(float(np.quantile(token_kl, 0.99))),
        "kl_max": Estimate(float(token_kl.max())),
        **{name: mean(name) for name in others},
    }


def ratio(sums: Floats, weights: Floats) -> Estimate:
    """Σ sums / Σ weights, with the standard error of that ratio over windows (nan for a single one)."""
    if not weights.any():  # images without labels, a text without words
        return Estimate(float("nan"))
    value = float(sums.sum() / weights.sum())
    return Estimate(value, ratio_error(sums - value * weights, weights))


def ratio_error(residuals: Floats, weights: Floats) -> float:
    """The standard error of Σ residuals / Σ weights, for residuals that sum to zero."""
    count = len(residuals)
    if count < 2 or not weights.any():
        return float("nan")
    return float(np.sqrt((residuals**2).sum() / (count - 1) / count)) / float(
        weights.mean()
    )


def _decibels(
    signal: Estimate, error: Estimate, windows: Sequence[WindowMetrics]
) -> Estimate:
    """10 log10 of signal over error; infinite if nothing changed. Standard error by the delta method."""
    if error.value == 0.0:
        return Estimate(float("inf"))
    value = 10 * float(np.log10(signal.value / error.value))
    if len(windows) < 2:
        return Estimate(value)
    signals = np.array([w.sums["signal"] / w.tokens for w in windows])
    errors = np.array([w.sums["squared_error"] / w.tokens for w in windows])
    relative = signals / signal.value - errors / error.value
    return Estimate(
        value, 10 / np.log(10) * float(relative.std(ddof=1) / np.sqrt(len(windows)))
    )


# -- loss by position: does it grow along the text? ----------------------------------------------------------

# A recurrent state carries its errors on, so a plan that loses little on 512 tokens may lose more after 8,000. Each
# window gives a mean per bin of positions, and a slope over those bins by least squares. Windows are independent, the
# tokens in one are not. So errors, also the slope's, are taken over windows.
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
        int(place): mean for (kind, _, place), mean in parts if kind == name and place
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
    places = (starts + counts / 2) / 1000
    away = counts * (places - np.average(places, weights=counts))
    slopes = means @ away / (away @ places) if len(starts) > 1 else np.zeros(len(means))
    once = np.ones(len(means))
    each = tuple(ratio(column, once) for column in means.T)
    return PositionCurve(tuple(starts.tolist()), each, ratio(slopes, once), len(means))
