"""Sensitivity by component kind: range, quartiles and median, for each format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from kl_lens.reporting.data import KL
from kl_lens.reporting.markup import Html, tag
from kl_lens.reporting.numbers import number
from kl_lens.reporting.palette import format_class
from kl_lens.reporting.scales import logarithmic
from kl_lens.reporting.svg import (
    CHARACTER,
    drawing,
    figure,
    legend,
    line,
    outline,
    places,
    text,
    titled,
)
from kl_lens.run.records import Component, Measurement

_LANE = 13.0

# Kind → series → values.
Groups = Mapping[str, Mapping[str, Sequence[float]]]


def values_by_kind(
    components: Sequence[Component], measurements: Sequence[Measurement]
) -> dict[str, dict[str, list[float]]]:
    """Kind → format → KL of each component, kinds from most to least sensitive."""
    kinds = {c.name: c.kind for c in components}
    spreads: dict[str, dict[str, list[float]]] = {}
    for m in measurements:
        if KL in m.metrics:
            spreads.setdefault(kinds[m.component], {}).setdefault(m.format, []).append(m.metrics[KL].value)
    return dict(sorted(spreads.items(), key=lambda item: -max(median(v) for v in item[1].values())))


def by_kind(
    components: Sequence[Component], measurements: Sequence[Measurement], noise: float | None
) -> Html:
    groups = values_by_kind(components, measurements)
    names = list(dict.fromkeys(m.format for m in measurements))
    series = {
        name: (format_class(name), "circle" if i % 2 == 0 else "diamond") for i, name in enumerate(names)
    }
    return figure(
        "By component kind",
        spread_rows(groups, series, "KL, nats per token", "Sensitivity by component kind", noise),
        "Dot: median; thick line: the middle half; thin line: from the least to the most sensitive.",
        legend([(name, shape, colour) for name, (colour, shape) in series.items()]),
    )


def spread_rows(
    groups: Groups, series: Mapping[str, tuple[str, str]], unit: str, title: str, noise: float | None = None
) -> Html:
    """Rows of spreads on one logarithmic axis; `series` gives each its colour and shape."""
    values = [v for row in groups.values() for spread in row.values() for v in spread if 0 < v < math.inf]
    near = noise is not None and noise > 0 and bool(values) and noise > min(values) / 100
    scale = logarithmic([*values, noise] if near and noise else values)
    left = 12 + CHARACTER * max((len(kind) for kind in groups), default=4)
    width, top = 460.0, 20.0
    height = top + sum(_LANE * len(series) + 10 for _ in groups) + 40
    scale = scale.placed(left, width - 14)
    bottom = height - 40
    parts = [
        text(4, 12, "" if near or not noise else f"noise floor {number(noise)}: left of the axis", "t note")
    ]
    for value, words in scale.ticks():
        parts += [line(scale(value), top, scale(value), bottom, "grid")]
        parts += [text(scale(value), bottom + 15, words, "t tick", "middle")]
    if near and noise:
        parts += [line(scale(noise), top - 6, scale(noise), bottom, "rule")]
        parts += [text(scale(noise) + 4, top - 2, "noise floor", "t note")]
    parts += [line(left, bottom, width - 14, bottom, "axis")]
    parts += [text((left + width) / 2, height - 6, unit, "t name", "middle")]
    marks, y = [], top + 5
    for kind, row in groups.items():
        parts.append(text(left - 8, y + _LANE * len(series) / 2 + 4, kind, "t tick", "end"))
        for name, (colour, shape) in series.items():
            y += _LANE
            spread = sorted(v for v in row.get(name, ()) if 0 < v < math.inf)
            if spread:
                places_ = [scale(v) for v in _five(spread)]
                parts += _spread(places_, y - _LANE / 2, colour)
                marks.append(
                    titled(
                        f"m {colour}",
                        _words(kind, name, spread),
                        outline(shape, places_[2], y - _LANE / 2, 4.5),
                    )
                )
        y += 10
        parts.append(line(left, y - 5, width - 14, y - 5, "grid"))
    return drawing(title, width, height, *parts, tag("g", *marks, class_="marks"))


def _five(values: Sequence[float]) -> list[float]:
    """Least, lower quartile, median, upper quartile, most."""
    if len(values) == 1:
        return [values[0]] * 5
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return [values[0], low, middle, high, values[-1]]


def _spread(x: Sequence[float], y: float, colour: str) -> list[Html]:
    if x[0] == x[4]:
        return []
    return [
        line(x[0], y, x[4], y, f"err {colour}"),
        tag("path", d=f"M{places(x[1])} {places(y)}H{places(x[3])}", class_=f"thick {colour}"),
    ]


def _words(kind: str, name: str, values: Sequence[float]) -> str:
    five = _five(values)
    count = f"{len(values)} component" + ("s" if len(values) != 1 else "")
    if len(values) == 1:
        return f"{kind}, {name}: {number(five[2])} nats/token ({count})"
    return (
        f"{kind}, {name}: median {number(five[2])} nats/token ({count})\n"
        f"middle half {number(five[1])} to {number(five[3])}\nfrom {number(five[0])} to {number(five[4])}"
    )
