"""Numbers as the report writes them."""

from __future__ import annotations

import math

from kl_lens.base.units import human_bytes
from kl_lens.run.records import Estimate


def number(value: float | None, digits: int = 3) -> str:
    """`0.0123`, `1.2e-7`, `–` for what is not known."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:,.0f}"


def with_error(estimate: Estimate | None, digits: int = 3) -> str:
    """`0.0091 ± 0.0005`, `8.3e-4 ± 3e-5`: the standard error to one digit, the value to the same place."""
    if estimate is None:
        return "–"
    value, error = estimate.value, estimate.standard_error
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return number(value, digits) + ("" if math.isnan(error) else f" ± {number(error, 1)}")
    place = -math.floor(math.log10(float(f"{error:.0e}")))  # of the error's digit
    if 0 <= place <= 5 and abs(value) >= 1e-3:
        return f"{value:,.{place}f} ± {error:.{place}f}"
    digits = max(1, place + 1 + math.floor(math.log10(abs(value)))) if value else 1
    return f"{number(value, digits)} ± {number(error, 1)}"


def fixed_with_error(estimate: Estimate | None, decimals: int = 2) -> str:
    """`21.67 ± 0.31`: for values whose scale is known, such as perplexities."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    if abs(estimate.value) >= 1e5:
        return with_error(estimate)
    text = f"{estimate.value:.{decimals}f}"
    return text if math.isnan(estimate.standard_error) else f"{text} ± {estimate.standard_error:.{decimals}f}"


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def count(number_: int, noun: str) -> str:
    return f"{number_} {noun}" if number_ == 1 else f"{number_} {noun}s"


def size(count: float | None) -> str:
    return "–" if count is None else human_bytes(count)
