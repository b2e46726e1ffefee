"""Charts: Vega-Lite specifications, drawn as SVG by vl-convert when the report is made.

Colours are CSS variables with a fallback. report.css sets them in the dark; else they are those of paper.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_lens.judging.duel import Entrant
from kl_lens.reporting.markup import Html, clean

WIDTH = 380
HEIGHT = 270
SERIES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b5568f",
    "#a97400",
    "#5b6470",
    "#7a5195",
    "#3b8ea5",
)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
STAR = "M0,-1.3L.32,-.44L1.24,-.4L.52,.17L.76,1.05L0,.54L-.76,1.05L-.52,.17L-1.24,-.4L-.32,-.44Z"
RECOMMENDED = "recommended"  # the series with the star
# From no damage to most; each step of log KL looks equally large (OKLab).
RAMP = (
    "#f8f0da",
    "#f7d3bb",
    "#f4b69d",
    "#f0987f",
    "#e47c6a",
    "#cd6768",
    "#b75265",
    "#a13c60",
    "#842f5b",
    "#652656",
    "#471c4f",
    "#2c0f48",
)
BITS = {
    2: "#a3326f",
    3: "#b3262e",
    4: "#e69f00",
    5: "#009e73",
    6: "#8d5fae",
    8: "#0072b2",
    16: "#8a8f98",
}
_PAPER = {
    "ink": "#1c1f24",
    "soft": "#59606a",
    "line": "#b9bcb7",
    "grid": "#ebece8",
    "paper": "#ffffff",
}


def colour(name: str) -> str:
    """A variable of report.css, and what it is without that: `ink`, `s0` (a series), `h3` (the ramp), `b4` (bits)."""
    value = _PAPER.get(name)
    if value is None:
        number = int(name[1:])
        value = (
            {"s": SERIES, "h": RAMP}[name[0]][number] if name[0] != "b" else BITS[number]
        )
    return f"var(--{name},{value})"


def bits_colour(bits: float) -> str:
    """Of formats with about so many bits per weight."""
    return colour(f"b{min(BITS, key=lambda level: abs(level - bits))}")


_CONFIG: dict[str, Any] = {
    "background": None,
    "padding": {"left": 14, "top": 5, "right": 10, "bottom": 5},  # fonts differ
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "text": {"fontSize": 12, "color": colour("ink")},
    "axis": {
        "labelColor": colour("soft"),
        "titleColor": colour("soft"),
        "gridColor": colour("grid"),
        "tickColor": colour("line"),
        "domainColor": colour("line"),
        "labelFontSize": 13,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "legend": {
        "orient": "top",
        "title": None,
        "labelColor": colour("soft"),
        "labelFontSize": 13,
        "columns": 3,
        "labelLimit": 220,
        "symbolSize": 70,
        "symbolOpacity": 1,
        "columnPadding": 24,
    },
}


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification; in a notebook, its picture."""

    spec: dict[str, Any] = field(repr=False)

    def svg(self) -> Html:
        """With our colours as variables, for a page that defines them."""
        return Html(_drawn(json.dumps(self.spec)))

    def _repr_svg_(self) -> str:
        """With the colours of paper, for programs that know no variables."""
        return re.sub(r"var\(--\w+,(#\w+)\)", r"\1", self.svg())


_GEOMETRY = re.compile(r' (?:d|transform)="[^"]*"')  # and no words
_FRACTION = re.compile(r"(\d\.\d)\d+(?=[,)])")


@functools.lru_cache(64)
def _drawn(spec: str) -> str:
    import vl_convert  # a JavaScript engine: not for those who only want a number

    drawn = vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
    return _GEOMETRY.sub(lambda shape: _FRACTION.sub(r"\1", shape[0]), drawn)


@dataclass(frozen=True)
class Axis:
    """Linear from low to high, logarithmic, or logarithmic on both sides of ± `around`."""

    title: str
    low: float
    high: float
    log: bool = False
    around: float = 0.0

    def place(self, value: float, length: float) -> float:
        """Where a value stands, in pixels."""
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return length * (at - low) / (high - low)

    def level(self, value: float) -> int:
        """Which of the ramp's equal steps a value is in."""
        share = (
            1.0
            if math.isinf(value)
            else self.place(value, 1)
            if value > 0 or not self.log
            else 0.0
        )
        return min(len(RAMP) - 1, max(0, int(len(RAMP) * share)))

    def encoding(self, field: str) -> dict[str, Any]:
        scale: dict[str, Any] = {
            "domain": [self.low, self.high],
            "nice": False,
            "zero": False,
        }
        axis: dict[str, Any] = {
            "format": "~g" if self.log or self.around else "~r",
            "tickCount": 5,
        }
        if self.log:
            scale["type"] = "log"
            axis["values"] = log_ticks(self.low, self.high)
        elif self.around:
            scale |= {"type": "symlog", "constant": self.around}
        words = {"field": field, "type": "quantitative", "title": clean(self.title)}
        return words | {"scale": scale, "axis": axis}


def unit_of(count: float) -> tuple[float, str]:
    """One unit for a whole axis."""
    for divisor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= divisor:
            return divisor, name
    return 1.0, "bytes"


def axis(
    title: str, values: Iterable[float], *, log: bool | None = None, around: float = 0.0
) -> Axis:
    """As long as the values need; logarithmic, unless told, if they span more than a decade."""
    finite = [v for v in values if math.isfinite(v)]
    positive = [v for v in finite if v > 0]
    if log is None:
        log = (
            bool(positive)
            and len(positive) == len(finite)
            and max(positive) > 10 * min(positive)
        )
    if log:
        low, high = (min(positive), max(positive)) if positive else (0.1, 10.0)
        beside = max(1.15, (high / low) ** 0.06)
        return Axis(title, low / beside, high * beside, True)
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    beside = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(title, low - beside, high + beside, around=around)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, at most about seven; within two decades 1, 2, 5; within one more."""
    decades = math.log10(high / low)
    digits = (
        (1,)
        if decades > 2
        else (1, 2, 5)
        if decades > 0.8
        else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    )
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(decades / 7))
    ticks = [
        float(f"{digit}e{power}")
        for power in exponents
        if power % every == 0
        for digit in digits
    ]
    return [value for value in ticks if low <= value <= high] or [
        float(f"{math.sqrt(low * high):.2g}")
    ]


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    words: str  # for pointers and screen readers
    series: str = ""
    low: float | None = None  # ends of the error bar
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str = "soft"
    dashed: bool = False


def scatter(
    x: Axis,
    y: Axis,
    dots: Sequence[Dot],
    lines: Sequence[Line] = (),
    *,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Chart:
    """Dots with error bars and labels over lines; a legend if there are several series."""
    layers: list[dict[str, Any]] = []
    for line in lines:
        mark = {
            "type": "line",
            "color": colour(line.colour),
            "strokeWidth": 1.6,
            "aria": False,
            "clip": True,
        }
        values = [{"x": a, "y": b} for a, b in line.points]
        layers.append(
            {
                "data": {"values": values},
                "mark": mark | ({"strokeDash": [5, 4]} if line.dashed else {}),
            }
        )
    series = sorted({dot.series for dot in dots}, key=[dot.series for dot in dots].index)
    shapes = [
        STAR if s == RECOMMENDED else SHAPES[i % len(SHAPES)]
        for i, s in enumerate(series)
    ]
    labels = _placed(x, y, dots, width, height)
    rows = [
        {
            "x": d.x,
            "y": d.y,
            "series": clean(d.series),
            "words": clean(d.words),
            **labels.get(i, {"label": ""}),
        }
        | (
            {}
            if d.low is None or d.high is None
            else {"low": max(d.low, y.low), "high": min(d.high, y.high)}
        )
        for i, d in enumerate(dots)
    ]
    legend = {} if len(series) > 1 else {"legend": None}
    domain = [clean(s) for s in series]
    hue, shape = (
        {"field": "series", "scale": {"domain": domain, "range": values}} | legend
        for values in (
            [colour(f"s{i % len(SERIES)}") for i in range(len(series))],
            shapes,
        )
    )
    dotted: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "rule", "opacity": 0.6, "aria": False},
            "encoding": {"y": {"field": "low"}, "y2": {"field": "high"}, "color": hue},
        },
        {
            "name": "dots",
            "mark": {
                "type": "point",
                "filled": True,
                "opacity": 1,
                "size": 62,
                "aria": any(d.words for d in dots),
                "stroke": colour("paper"),
                "strokeWidth": 0.8,
            },
            "encoding": {"color": hue, "shape": shape, "description": {"field": "words"}},
        },
        {
            "transform": [{"filter": "datum.label"}],
            "mark": {
                "type": "text",
                "aria": False,
                "dx": {"expr": "datum.dx"},
                "dy": {"expr": "datum.dy"},
                "align": {"expr": "datum.align"},
                "baseline": "middle",
            },
            "encoding": {"text": {"field": "label"}},
        },
    ]
    layers.append({"data": {"values": rows}, "layer": dotted})
    encoding = {"x": x.encoding("x"), "y": y.encoding("y")}
    spec = {
        "width": width,
        "height": height,
        "config": _CONFIG,
        "layer": layers,
        "encoding": encoding,
    }
    return Chart(spec)


def sized_chart(files: Sequence[Entrant]) -> Chart:
    """KL of files against their size, with a series for each runtime."""
    divisor, unit = unit_of(max(file.bytes for file in files))
    kls = [file.values["kl_mean"] for file in files]
    x = axis(f"size of the file, {unit}", [file.bytes / divisor for file in files])
    y = axis("KL from the original, nats", [kl.value for kl in kls])
    ends = [(kl.value - kl.standard_error, kl.value + kl.standard_error) for kl in kls]
    dots = [
        Dot(
            f.bytes / divisor,
            f.kl,
            ", ".join(filter(None, (f.name, f.maker, f.runtime))),
            f.runtime,
            *end,
            label=f.name,
        )
        for f, end in zip(files, ends, strict=True)
    ]
    return scatter(x, y, dots, width=2 * WIDTH, height=HEIGHT)


def _placed(
    x: Axis, y: Axis, dots: Sequence[Dot], width: int, height: int
) -> dict[int, dict[str, Any]]:
    """Dot → its label and where it stands: right, left, above or below, where nothing is yet; else nowhere."""
    if x.around or y.around:
        return {}
    at = [(x.place(d.x, width), height - y.place(d.y, height)) for d in dots]
    boxes = [(a - 6, b - 6, a + 6, b + 6) for a, b in at]
    labels: dict[int, dict[str, Any]] = {}
    order = sorted(
        (i for i, d in enumerate(dots) if d.label),
        key=lambda i: dots[i].series != RECOMMENDED,
    )
    for i in order:
        (a, b) = at[i]
        half = 3.4 * len(dots[i].label)
        for dx, dy, align in (
            (11, 0, "left"),
            (-11, 0, "right"),
            (0, -14, "center"),
            (0, 14, "center"),
        ):
            middle = a + dx + {"left": half, "right": -half, "center": 0.0}[align]
            box = (middle - half, b + dy - 7, middle + half, b + dy + 7)
            inside = box[0] >= 0 and box[2] <= width and box[1] >= -8 and box[3] <= height
            if inside and not any(
                _overlap(box, neighbour) for neighbour in boxes if neighbour != boxes[i]
            ):
                boxes.append(box)
                labels[i] = {
                    "label": clean(dots[i].label),
                    "dx": dx,
                    "dy": dy,
                    "align": align,
                }
                break
    return labels


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@dataclass(frozen=True)
class Cell:
    """A component in a map: over one block, or (block None) over the whole width."""

    row: str
    block: int | None
    colour: str  # as `colour` knows it
    words: str
    hatched: bool = False


def grid_map(cells: Sequence[Cell]) -> Chart:
    """Rows of components, blocks across; those outside of blocks over the whole width."""
    blocks = 1 + max((c.block for c in cells if c.block is not None), default=0)
    rows = list(
        dict.fromkeys(c.row for c in sorted(cells, key=lambda c: c.block is None))
    )
    values = [
        {
            "row": clean(c.row),
            "from": c.block or 0,
            "to": blocks if c.block is None else c.block + 1,
            "fill": colour(c.colour),
            "hatch": int(c.hatched),
            "words": clean(c.words),
        }
        for c in cells
    ]
    every = 1 if blocks <= 16 else 4 if blocks <= 40 else 8
    ticks = {
        "values": [b + 0.5 for b in range(0, blocks, every)],
        "labelExpr": "floor(datum.value)",
        "grid": False,
        "ticks": False,
        "domain": False,
    }
    across = {
        "field": "from",
        "type": "quantitative",
        "title": "block",
        "axis": ticks,
        "scale": {"domain": [0, blocks], "nice": False},
    }
    down = {
        "field": "row",
        "type": "nominal",
        "sort": [clean(row) for row in rows],
        "title": None,
        "axis": {"ticks": False, "domain": False, "labelLimit": 130},
    }
    rect = {"type": "rect", "stroke": colour("paper"), "strokeWidth": 1.5}
    layers: list[dict[str, Any]] = [
        {
            "name": "cells",
            "mark": rect,
            "encoding": {
                "fill": {"field": "fill", "scale": None, "type": "nominal"},
                "description": {"field": "words"},
            },
        },
        {
            "name": "hatch",
            "mark": {"type": "rect", "fill": "url(#hatch)", "aria": False},
            "encoding": {
                "opacity": {"field": "hatch", "type": "quantitative", "scale": None}
            },
        },
    ]
    width = max(WIDTH - 40, 11 * blocks)
    return Chart(
        {
            "width": width,
            "height": {"step": 24},
            "config": _CONFIG,
            "data": {"values": values},
            "layer": layers,
            "encoding": {"x": across, "x2": {"field": "to"}, "y": down},
        }
    )
