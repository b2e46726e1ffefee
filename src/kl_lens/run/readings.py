"""Readings: what every window says about one subject, and the statistics that turn them into reported numbers.

Tokens of one window share context and topic, so they are not independent; windows are. So every error over text is an
error over windows. Comparisons take the difference window by window (or example by example) first, so that what is hard
for both models cancels.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kl_lens.run.records import Estimate

# What a stored number means. Raise it, with a dated reason, whenever a metric's definition changes.
# 1 (2026-11-15): first version.
METRICS_VERSION = 1

KL = "kl_teacher_to_student"

NLL = "nll"  # −ln p(token | context), nats
CORRECT = "correct"  # rows with the right class
WORDS = "words"  # that begin in the scored tokens
SAME_TOP = "same_top"
_BUILT_IN = (
    KL,
    "kl_student_to_teacher",
    "squared_error",
    "signal",
    "delta_cross_entropy",
    SAME_TOP,
    NLL,
    CORRECT,
    WORDS,
)

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.float32]
_LARGEST_EXPONENT = 700.0  # e^709 is the largest double; a destroyed model may exceed it


@dataclass(frozen=True)
class Reading:
    """One window of one subject, whoever read it: the sweep, a plan in PyTorch, a file in its runtime."""

    window: int
    tokens: int  # rows compared
    targets: int  # rows that have a true next token, or a class
    sums: Mapping[str, float]  # over tokens; of squares: the mean over the vocabulary
    arrays: Mapping[str, bytes]  # the value of every token, float32
    seconds: float = 0.0

    @property
    def kl(self) -> float:
        """Σ KL(teacher ‖ student)."""
        return self.sums[KL]

    def by_token(self, name: str = KL) -> Tokens:
        return np.frombuffer(self.arrays[name], np.float32)

    def to_json(self) -> dict[str, Any]:
        """As a record of the journal, which knows the window by another name."""
        arrays = {
            name: base64.b64encode(array).decode("ascii")
            for name, array in self.arrays.items()
        }
        return {key: value for key, value in vars(self).items() if key != "window"} | {
            "arrays": arrays
        }

    @classmethod
    def from_json(cls, window: int, stored: Mapping[str, Any]) -> Self:
        arrays = {
            name: base64.b64decode(array) for name, array in stored["arrays"].items()
        }
        return cls(window, **{**stored, "arrays": arrays})


def packed(values: npt.NDArray[np.floating[Any]]) -> bytes:
    """As an array of a reading."""
    return values.astype(np.float32).tobytes()


def window_kl(windows: Sequence[Reading]) -> Floats:
    """Mean KL(teacher ‖ student) per token of each window."""
    return np.array([w.kl / w.tokens for w in windows])


def summarise(windows: Sequence[Reading]) -> dict[str, Estimate]:
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
    every = np.concatenate([w.by_token() for w in windows])
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
        "kl_p99": Estimate(float(np.quantile(every, 0.99))),
        "kl_max": Estimate(float(every.max())),
        **other_means(windows),
    }


def likelihood_values(
    readings: Sequence[Reading],
    original: Sequence[Reading] | None = None,
    *,
    images: bool = False,
) -> dict[str, Estimate]:
    """Cross-entropy; of text the perplexity per token and per word, of images top-1 and the perplexity per image. With
    the original's readings also the change of each."""
    targets = np.array([reading.targets for reading in readings], float)
    counted = {"token": targets}
    means = {"cross_entropy": NLL}
    if images:
        means = {"top1": CORRECT, **means}
    else:
        counted["word"] = _sums(readings, WORDS)
    nll = _sums(readings, NLL)
    values = {}
    for name, counts in counted.items():
        values[f"{name}_perplexity"] = perplexity(nll, counts)
        if original is not None:
            change = perplexity_change(nll, _sums(original, NLL), counts)
            values[f"{name}_perplexity_change"] = change
    for name, summed in means.items():
        values[name] = ratio(_sums(readings, summed), targets)
        if original is not None:
            difference = _sums(readings, summed) - _sums(original, summed)
            values[f"{name}_change"] = ratio(difference, targets)
    return values


def divergence_values(readings: Sequence[Reading]) -> dict[str, Estimate]:
    """KL from the original over tokens, in nats; how often the most likely token is the same; other objectives."""
    kl = [reading.by_token() for reading in readings]
    shares = {"kl_median": 0.5, "kl_p99": 0.99, "kl_p999": 0.999}
    tokens = np.array([reading.tokens for reading in readings], float)
    return {
        "kl_mean": mean_kl(readings),
        **{name: quantile(kl, share) for name, share in shares.items()},
        "kl_max": Estimate(float(max(window.max() for window in kl))),
        SAME_TOP: ratio(_sums(readings, SAME_TOP), tokens),
        **other_means(readings),
    }


def other_means(readings: Sequence[Reading]) -> dict[str, Estimate]:
    """Per token: other objectives that all windows have."""
    tokens = np.array([reading.tokens for reading in readings], float)
    return {
        name: ratio(_sums(readings, name), tokens)
        for name in readings[0].sums
        if name not in _BUILT_IN and all(name in reading.sums for reading in readings)
    }


def mean_kl(readings: Sequence[Reading]) -> Estimate:
    tokens = np.array([reading.tokens for reading in readings], float)
    return ratio(_sums(readings, KL), tokens)


def _sums(readings: Sequence[Reading], name: str) -> Floats:
    return np.array([reading.sums[name] for reading in readings], float)


# -- statistics ---------------------------------------------------------------------------------------------


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


def _decibels(signal: Estimate, error: Estimate, windows: Sequence[Reading]) -> Estimate:
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


def perplexity(nll: Floats, weights: Floats) -> Estimate:
    """exp of the mean negative log-likelihood per token (or word), by the delta method."""
    mean = ratio(nll, weights)
    value = _exp(mean.value)
    return Estimate(value, value * mean.standard_error)


def perplexity_change(nll: Floats, original: Floats, weights: Floats) -> Estimate:
    """Perplexity minus the original's on the same windows, with a paired error."""
    loss = ratio(nll, weights).value
    original_loss = ratio(original, weights).value
    residuals = _exp(loss) * (nll - loss * weights) - _exp(original_loss) * (
        original - original_loss * weights
    )
    return Estimate(_exp(loss) - _exp(original_loss), ratio_error(residuals, weights))


def quantile(windows: Sequence[npt.NDArray[np.float32]], share: float) -> Estimate:
    """A quantile over all tokens, with Woodruff's error.

    The share of tokens below the quantile has a plain standard error over windows. Half the distance between the
    quantiles at share ± that error is the error of the quantile. If share + error passes 1, or fewer than one token is
    expected beyond the quantile, the text is too short and no error is given.
    """
    tokens = np.concatenate(windows)
    value = float(np.quantile(tokens, share))
    below = np.array([float((window <= value).sum()) for window in windows])
    error = ratio(
        below, np.array([float(len(window)) for window in windows])
    ).standard_error
    is_certain = (
        share - error > 0 and share + error < 1 and len(tokens) * (1 - share) >= 1
    )  # False for nan
    if not is_certain:
        return Estimate(value)
    low, high = np.quantile(tokens, [share - error, share + error])
    return Estimate(value, float(high - low) / 2)


def mean(values: Floats) -> Estimate:
    """The mean over examples with its standard error."""
    return ratio(values, np.ones(len(values)))


def paired_drop(before: Floats, after: Floats) -> Estimate:
    """The mean of `before` − `after` on the same examples, with its standard error.

    If every example is right or wrong, the error is that of Agresti and Min: half an example is added to each of the
    four outcomes. Two models that agree on all of forty examples may still differ by some percent; the plain formula
    would claim an error of zero.
    """
    change = before - after
    if not np.isin(np.concatenate([before, after]), (0.0, 1.0)).all():
        return mean(change)
    count = len(change) + 2
    differing = float((change != 0).sum()) + 1
    balance = float(change.sum())
    return Estimate(
        float(change.mean()), math.sqrt(differing - balance**2 / count) / count
    )


def paired_by_token(
    readings: Sequence[Reading], original: Sequence[Reading], array: str, stretch: int
) -> tuple[Estimate, int]:
    """The mean difference of all tokens, and the number of stretches of tokens that its error is from."""
    sums = []
    sizes = []
    for reading, before in zip(readings, original, strict=True):
        change = reading.by_token(array).astype(float) - before.by_token(array)
        # The last stretch takes what is left over.
        starts = stretch * np.arange(max(1, len(change) // stretch))
        sums.append(np.add.reduceat(change, starts))
        sizes.append(np.diff([*starts, len(change)]).astype(float))
    return ratio(np.concatenate(sums), np.concatenate(sizes)), sum(map(len, sums))


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))
