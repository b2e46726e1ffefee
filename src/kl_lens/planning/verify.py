"""Prediction against reality: does the sum of single damages explain the joint damage?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.records import Estimate


@dataclass(frozen=True)
class Verification:
    """Predicted and measured KL of one plan.

    The error of a prediction is the sum of its parts' standard errors, an upper bound: the parts were
    measured on the same windows, and how their errors go together is not known.
    """

    predicted: Estimate
    measured: Estimate
    z: float

    @property
    def difference(self) -> float:
        """Measured less predicted."""
        return self.measured.value - self.predicted.value

    @property
    def standard_error(self) -> float:
        """Of the difference; the two were measured on different text, so independently."""
        return math.hypot(self.predicted.standard_error, self.measured.standard_error)

    @property
    def ratio(self) -> float:
        return self.measured.value / self.predicted.value if self.predicted.value else math.inf

    @property
    def explained(self) -> bool | None:
        """Whether the errors explain the difference; None where an error is not known."""
        if not math.isfinite(self.standard_error) or not math.isfinite(self.difference):
            return None
        return abs(self.difference) <= self.z * self.standard_error

    @property
    def message(self) -> str:
        """One line for people; a warning where the two differ by more than their errors explain."""
        numbers = (
            f"predicted {_show(self.predicted)}, measured {_show(self.measured)} nats per token "
            f"({self.ratio:.3g} times)"
        )
        if self.explained is None:
            return f"{numbers}; an error is not known, so nothing follows from the difference"
        if self.explained:
            return f"{numbers}; the errors explain the difference"
        direction = "add up to more" if self.difference > 0 else "partly cancel"
        return (
            f"warning: {numbers}; the difference is {abs(self.difference) / self.standard_error:.1f} standard errors: "
            f"the components' damages {direction} together, or the texts differ"
        )


def interaction(pairs: Iterable[tuple[float, float]]) -> float:
    """By what factor whole plans lose more than their parts added up: the geometric mean of measured over predicted.

    Along the frontier it varies by a few percent; what one factor leaves of the error is in docs/method.md.
    """
    logs = [math.log(measured / predicted) for predicted, measured in pairs if predicted > 0 < measured]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def verify(
    predicted: Estimate, measured: Estimate | npt.NDArray[np.float64], *, z: float = 2.0
) -> Verification:
    """Compares a prediction with a measured joint KL: an estimate, or the mean KL of every window."""
    if not isinstance(measured, Estimate):
        windows = np.asarray(measured, dtype=np.float64)
        error = float(windows.std(ddof=1)) / math.sqrt(len(windows)) if len(windows) > 1 else math.nan
        measured = Estimate(float(windows.mean()), error)
    return Verification(predicted, measured, z)


def _show(estimate: Estimate) -> str:
    if math.isfinite(estimate.standard_error):
        return f"{estimate.value:.4g} ± {estimate.standard_error:.1g}"
    return f"{estimate.value:.4g}"
