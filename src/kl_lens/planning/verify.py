"""Compares the predicted KL of a plan (the sum of its parts) with the measured one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kl_lens.run.records import Estimate

MOST_ERRORS = 2.0  # a difference of more standard errors is not explained by them


@dataclass(frozen=True)
class Verification:
    explained: bool | None  # whether the errors explain the difference; None if an error is unknown
    message: str  # one line for the user


def verify(predicted: Estimate, measured: Estimate) -> Verification:
    """Prediction and measurement use different text, so their errors are independent."""
    ratio = measured.value / predicted.value if predicted.value else math.inf
    numbers = (
        f"predicted {spell_estimate(predicted)}, measured {spell_estimate(measured)} nats per token "
        f"({ratio:.3g} times)"
    )
    difference = measured.value - predicted.value
    error = math.hypot(predicted.standard_error, measured.standard_error)
    if not math.isfinite(error) or not math.isfinite(difference):
        return Verification(None, f"{numbers}; without a known error the difference means nothing")
    if abs(difference) <= MOST_ERRORS * error:
        return Verification(True, f"{numbers}; the errors explain the difference")
    direction = "add up to more" if difference > 0 else "partly cancel"
    return Verification(
        False,
        f"warning: {numbers}; the difference is {abs(difference) / error:.1f} standard errors: the components' "
        f"damages {direction} together, or the texts differ",
    )


def interaction(pairs: Iterable[tuple[float, float]]) -> float:
    """How many times more whole plans lose than the sum of their parts: the geometric mean of measured / predicted.

    Along the frontier it varies by a few percent; docs/method.md has the remaining error.
    """
    logs = [math.log(measured / predicted) for predicted, measured in pairs if predicted > 0 < measured]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def spell_estimate(estimate: Estimate) -> str:
    """`0.0103 ± 0.0001`; an unknown error is left out."""
    if math.isfinite(estimate.standard_error):
        return f"{estimate.value:.4g} ± {estimate.standard_error:.1g}"
    return f"{estimate.value:.4g}"
