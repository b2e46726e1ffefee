"""From values to places on the paper: linear, logarithmic, and logarithmic on both sides of zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kl_lens.reporting.numbers import number, power_of_ten

_SMALLEST = 1e-300  # below it, a fifth of a number may be nothing


@dataclass(frozen=True)
class Scale:
    """Maps low … high to start … end. `threshold` is where a two-sided scale turns from linear to logarithmic."""

    kind: str  # linear, log, twosided
    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    threshold: float = 1.0

    def __call__(self, value: float) -> float:
        low, high = self._bent(self.low), self._bent(self.high)
        share = (self._bent(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def placed(self, start: float, end: float) -> Scale:
        return replace(self, start=start, end=end)

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, 1e-300))
        if self.kind == "twosided":
            return math.asinh(value / self.threshold)
        return value

    def ticks(self) -> list[tuple[float, str]]:
        """Where to draw a line, and what to write there."""
        if self.kind == "log":
            return _log_ticks(self.low, self.high)
        if self.kind == "twosided":
            return _twosided_ticks(self)
        return _linear_ticks(self.low, self.high)


def linear(values: Iterable[float], margin: float = 0.06) -> Scale:
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, _SMALLEST):  # one value, as far as ticks can tell
        beside = 0.1 * (largest if largest > _SMALLEST else 1.0)
        low, high = low - beside, high + beside
    padding = margin * (high - low)
    return Scale("linear", low - padding, high + padding)


def logarithmic(values: Iterable[float], margin: float = 0.06) -> Scale:
    positive = [v for v in values if math.isfinite(v) and v > 0] or [0.1, 10.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    if high - low < 0.3:
        low, high = low - 0.15, high + 0.15
    padding = margin * (high - low)
    return Scale("log", 10 ** (low - padding), 10 ** (high + padding))


def by_span(values: Sequence[float], decades: float = 1.0) -> Scale:
    """Logarithmic where the values span more than `decades`, linear otherwise."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 10**decades:
        return logarithmic(finite)
    return linear(finite)


def twosided(values: Sequence[float], errors: Sequence[float]) -> Scale:
    """For changes that may be negative and span decades: linear within the usual error, logarithmic beyond."""
    finite = sorted(v for v in values if math.isfinite(v))
    usual = sorted(e for e in errors if math.isfinite(e) and e > 0)
    low, high = (min(0.0, finite[0]), max(0.0, finite[-1])) if finite else (-1.0, 1.0)
    reach = max(abs(low), abs(high)) or 1.0
    threshold = usual[len(usual) // 2] if usual else reach / 100
    if reach / threshold < 20:
        return linear([low, high])
    scale = Scale("twosided", low, high, threshold=threshold)
    padding = 0.06 * (scale._bent(high) - scale._bent(low))
    return replace(
        scale,
        low=threshold * math.sinh(scale._bent(low) - padding),
        high=threshold * math.sinh(scale._bent(high) + padding),
    )


def _linear_ticks(low: float, high: float, wanted: int = 5) -> list[tuple[float, str]]:
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs((high - low) / s - wanted))
    first = math.ceil(low / step - 1e-9)
    values = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    decimals = max(0, -math.floor(math.log10(step)) + (1 if f"{step / power:g}" == "2.5" else 0))
    if decimals > 4:
        return [(v, f"{v:.3g}") for v in values]
    return [(v, f"{v:,.{decimals}f}") for v in values]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = math.log10(high / low)
    if decades >= 2:
        every = max(1, math.ceil((last - first + 1) / 7))
        return [(10.0**e, power_of_ten(e)) for e in range(first, last + 1) if (e - first) % every == 0]
    steps = (1, 2, 5) if decades >= 0.8 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    values = [m * 10.0**e for e in range(first - 1, last + 1) for m in steps]
    return [(v, number(v, 2)) for v in values if low <= v <= high]


def _twosided_ticks(scale: Scale) -> list[tuple[float, str]]:
    reach = max(abs(scale.low), abs(scale.high))
    first, last = math.ceil(math.log10(scale.threshold)), math.floor(math.log10(reach))
    every = max(1, math.ceil((last - first + 1) / 5))
    exponents = [e for e in range(last, first - 1, -1) if (last - e) % every == 0]
    ticks = [(0.0, "0")]
    for exponent in exponents:
        ticks += [(10.0**exponent, power_of_ten(exponent)), (-(10.0**exponent), "−" + power_of_ten(exponent))]
    return sorted((v, text) for v, text in ticks if scale.low <= v <= scale.high)
