"""Standard errors over windows of text or examples of a task, paired when two models are compared.

Tokens of one window share context and topic, so they are not independent; windows are. So every error over text is an
error over windows. Comparisons take the difference window by window (or example by example) first, so that what is hard
for both models cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kl_lens.run.records import Estimate
from kl_lens.run.samples import Floats, ratio, ratio_error

_LARGEST_EXPONENT = 700.0  # e^709 is the largest double; a destroyed model may exceed it


def perplexity(nll: Floats, weights: Floats) -> Estimate:
    """exp of the mean negative log-likelihood per token (or word), by the delta method."""
    mean = ratio(nll, weights)
    value = _exp(mean.value)
    return Estimate(value, value * mean.standard_error)


def perplexity_change(nll: Floats, original: Floats, weights: Floats) -> Estimate:
    """Perplexity minus the original's on the same windows, with a paired error."""
    ours, theirs = ratio(nll, weights).value, ratio(original, weights).value
    residuals = _exp(ours) * (nll - ours * weights) - _exp(theirs) * (original - theirs * weights)
    return Estimate(_exp(ours) - _exp(theirs), ratio_error(residuals, weights))


def quantile(windows: Sequence[npt.NDArray[np.float32]], share: float) -> Estimate:
    """A quantile over all tokens, with Woodruff's error.

    The share of tokens below the quantile has a plain standard error over windows. Half the distance between the
    quantiles at share ± that error is the error of the quantile. If share + error passes 1, or fewer than one token is
    expected beyond the quantile, the text is too short and no error is given.
    """
    tokens = np.concatenate(windows)
    value = float(np.quantile(tokens, share))
    below = np.array([float((window <= value).sum()) for window in windows])
    error = ratio(below, np.array([float(len(window)) for window in windows])).standard_error
    known = share - error > 0 and share + error < 1 and len(tokens) * (1 - share) >= 1  # False for nan
    if not known:
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
    differing, balance = float((change != 0).sum()) + 1, float(change.sum())
    return Estimate(float(change.mean()), math.sqrt(differing - balance**2 / count) / count)


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))
