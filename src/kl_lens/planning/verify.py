"""Compares the predicted KL of a plan (the sum of its parts) with the measured one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.run.records import Estimate


@dataclass(frozen=True)
class Verification:
    """Predicted and measured KL of one plan.

    The error of the prediction is the sum of the standard errors of its parts. That is an upper bound: all parts were
    measured on the same windows, and their correlation is unknown.
    """

    predicted: Estimate
    measured: Estimate
    z: float

    @property
    def difference(self) -> float:
        """Measured minus predicted."""
        return self.measured.value - self.predicted.value

    @property
    def standard_error(self) -> float:
        """Of the difference; prediction and measurement use different text, so they are independent."""
        return math.hypot(self.predicted.standard_error, self.measured.standard_error)

    @property
    def ratio(self) -> float:
        return self.measured.value / self.predicted.value if self.predicted.value else math.inf

    @property
    def explained(self) -> bool | None:
        """Whether the errors explain the difference; None if an error is unknown."""
        if not math.isfinite(self.standard_error) or not math.isfinite(self.difference):
            return None
        return abs(self.difference) <= self.z * self.standard_error

    @property
    def message(self) -> str:
        """One line for the user; a warning if the errors do not explain the difference."""
        numbers = (
            f"predicted {spell_estimate(self.predicted)}, measured {spell_estimate(self.measured)} nats per token "
            f"({self.ratio:.3g} times)"
        )
        if self.explained is None:
            return f"{numbers}; without a known error the difference means nothing"
        if self.explained:
            return f"{numbers}; the errors explain the difference"
        direction = "add up to more" if self.difference > 0 else "partly cancel"
        return (
            f"warning: {numbers}; the difference is {abs(self.difference) / self.standard_error:.1f} standard errors: "
            f"the components' damages {direction} together, or the texts differ"
        )


def interaction(pairs: Iterable[tuple[float, float]]) -> float:
    """How many times more whole plans lose than the sum of their parts: the geometric mean of measured / predicted.

    Along the frontier it varies by a few percent; docs/method.md has the remaining error.
    """
    logs = [math.log(measured / predicted) for predicted, measured in pairs if predicted > 0 < measured]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def verify(
    predicted: Estimate, measured: Estimate | npt.NDArray[np.float64], *, z: float = 2.0
) -> Verification:
    """Compares a prediction with a measured KL: an estimate, or the mean KL of every window."""
    if not isinstance(measured, Estimate):
        windows = np.asarray(measured, dtype=np.float64)
        error = float(windows.std(ddof=1)) / math.sqrt(len(windows)) if len(windows) > 1 else math.nan
        measured = Estimate(float(windows.mean()), error)
    return Verification(predicted, measured, z)


def spell_estimate(estimate: Estimate) -> str:
    """`0.0103 ± 0.0001`; an unknown error is left out."""
    if math.isfinite(estimate.standard_error):
        return f"{estimate.value:.4g} ± {estimate.standard_error:.1g}"
    return f"{estimate.value:.4g}"
