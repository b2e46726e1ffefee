"""Drawing by hand: a frame with axes, marks that explain themselves, and labels that do not cover each other.

Each mark carries its numbers as an SVG `<title>`: a browser without scripts shows it on hover, and the page's script
turns it into a tooltip that also follows the keyboard and the finger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.scales import Scale
from kl_lens.run.records import Estimate

CROWD = 200  # marks of one figure beyond which only those with a label say what they are
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "down", "star", "plus")
# Width of a character in the units of the drawing. Text is never measured, only estimated, and fonts differ: these are
# for a wide one at the size that phones get.
CHARACTER = 7.6
_LABEL_CHARACTER = {False: 6.9, True: 8.4}  # of labels, plain and bold


def places(value: float) -> str:
    """A coordinate, as short as a tenth of a pixel allows."""
    return f"{value:.1f}".removesuffix(".0")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("path", d=f"M{places(x1)} {places(y1)}L{places(x2)} {places(y2)}", class_=class_)


def text(x: float, y: float, words: object, class_: str = "t", anchor: str | None = None) -> Html:
    return tag("text", words, x=places(x), y=places(y), class_=class_, text_anchor=anchor)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Html:
    return tag("path", d="M" + "L".join(f"{places(x)} {places(y)}" for x, y in points), class_=class_)


def titled(class_: str, title: str, d: str, plan: str | None = None) -> Html:
    """A path that can be hovered, focused and read aloud; one that stands for a plan can be pinned."""
    return tag("path", tag("title", title), class_=class_, d=d, data_plan=plan)


def outline(shape: str, x: float, y: float, r: float) -> str:
    """The path of a mark."""
    if shape == "square":
        s = 0.88 * r
        return f"M{places(x - s)} {places(y - s)}h{places(2 * s)}v{places(2 * s)}h{places(-2 * s)}z"
    if shape in ("triangle", "down"):
        sign = 1 if shape == "triangle" else -1
        top, base, half = y - sign * 1.2 * r, y + sign * 0.75 * r, 1.15 * r
        return f"M{places(x)} {places(top)}L{places(x + half)} {places(base)}H{places(x - half)}z"
    if shape == "diamond":
        s = 1.25 * r
        down, up = places(s), places(-s)
        return f"M{places(x)} {places(y - s)}l{down} {down}l{up} {down}l{up} {up}z"
    if shape in ("cross", "plus"):
        return _cross(x, y, r, 45 if shape == "cross" else 0)
    if shape == "star":
        return _star(x, y, 1.5 * r)
    arc = f"a{places(r)} {places(r)} 0 1 0"
    return f"M{places(x - r)} {places(y)}{arc} {places(2 * r)} 0{arc} {places(-2 * r)} 0z"


def _star(x: float, y: float, r: float) -> str:
    corners = []
    for index in range(10):
        radius = r if index % 2 == 0 else 0.42 * r
        angle = math.pi * (index / 5 - 0.5)
        corners.append(f"{places(x + radius * math.cos(angle))} {places(y + radius * math.sin(angle))}")
    return "M" + "L".join(corners) + "z"


def _cross(x: float, y: float, r: float, degrees: float) -> str:
    arm, half = 1.15 * r, 0.36 * r
    turn = math.radians(degrees)
    corners = [(-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half), (half, half),
               (half, arm), (-half, arm), (-half, half), (-arm, half), (-arm, -half), (-half, -half)]  # fmt: skip
    turned = [
        (x + a * math.cos(turn) - b * math.sin(turn), y + a * math.sin(turn) + b * math.cos(turn))
        for a, b in corners
    ]
    return "M" + "L".join(f"{places(a)} {places(b)}" for a, b in turned) + "z"


@dataclass(frozen=True)
class Mark:
    """One datum in a plot: where, with what error, how it looks, and what it says when asked."""

    x: float
    y: float
    title: str
    colour: str  # a class of palette.py
    shape: str = "circle"
    radius: float = 4.5
    y_error: tuple[float, float] | None = None  # low and high ends
    label: str | None = None
    emphasis: bool = False
    plan: str | None = None  # TARGET/PLAN, for the script

    @property
    def drawn_radius(self) -> float:
        return self.radius + (2 if self.emphasis else 0)


def _reach(mark: Mark) -> float:
    """How far a mark reaches from its middle."""
    return mark.drawn_radius * {"star": 1.5, "diamond": 1.25}.get(mark.shape, 1.15)


def ends(estimate: Estimate) -> tuple[float, float] | None:
    """One standard error to both sides."""
    if math.isnan(estimate.standard_error):
        return None
    return estimate.value - estimate.standard_error, estimate.value + estimate.standard_error


@dataclass
class Plot:
    """A frame with two scales. Lines lie under marks, labels above them."""

    title: str  # read aloud; the caption beside the figure is the page's
    x: Scale
    y: Scale
    x_title: str
    y_title: str
    width: float = 460
    height: float = 310
    left: float = 58
    right: float = 14
    top: float = 26
    bottom: float = 44
    marks: list[Mark] = field(default_factory=list)
    below: list[Html] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)  # attributes for the script

    def __post_init__(self) -> None:
        self.x = self.x.placed(self.left, self.width - self.right)
        self.y = self.y.placed(self.height - self.bottom, self.top)

    def curve(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        """A line through values that the frame holds."""
        inside = [(self.x(a), self.y(b)) for a, b in points if self.x.holds(a) and self.y.holds(b)]
        if len(inside) > 1:
            self.below.append(polyline(inside, f"line {class_}"))

    def render(self) -> Html:
        drawn = [m for m in self.marks if self.x.holds(m.x) and self.y.holds(m.y)]
        parts = [*self._axes(), *self.below]
        parts += [error for mark in drawn for error in self._errors(mark)]
        told = drawn if len(drawn) <= CROWD else [m for m in drawn if m.label]
        crowd: dict[str, list[str]] = {}
        for mark in drawn if len(drawn) > CROWD else ():
            place = outline(mark.shape, self.x(mark.x), self.y(mark.y), mark.radius)
            crowd.setdefault(mark.colour, []).append(place)
        parts += [tag("path", d="".join(paths), class_=f"m {colour}") for colour, paths in crowd.items()]
        parts.append(tag("g", *(self._mark(m) for m in told), class_="marks"))
        parts += self._labels(drawn)
        return drawing(self.title, self.width, self.height, *parts, **self.data)

    def frame(self, unit: float) -> str:
        """Where the scales lie, for a script that adds a mark; `unit`: what the x axis counts in."""

        def ends_of(scale: Scale) -> list[float | bool]:
            return [scale.low, scale.high, scale.start, scale.end, scale.kind == "log"]

        return json.dumps({"x": ends_of(self.x), "y": ends_of(self.y), "unit": unit})

    def _mark(self, mark: Mark) -> Html:
        kind = "m loud" if mark.emphasis else "m"
        path = outline(mark.shape, self.x(mark.x), self.y(mark.y), mark.drawn_radius)
        return titled(f"{kind} {mark.colour}", mark.title, path, mark.plan)

    def _errors(self, mark: Mark) -> list[Html]:
        if mark.y_error is None:
            return []
        x, (low, high) = self.x(mark.x), (self.y(self._inside(self.y, v)) for v in mark.y_error)
        return [line(x, low, x, high, f"err {mark.colour}")]

    @staticmethod
    def _inside(scale: Scale, value: float) -> float:
        return min(scale.high, max(scale.low, value))

    def _axes(self) -> list[Html]:
        bottom, right = self.height - self.bottom, self.width - self.right
        parts: list[Html] = []
        for value, words in self.x.ticks():
            x = self.x(value)
            parts.append(line(x, self.top, x, bottom, "grid"))
            parts.append(text(x, bottom + 15, words, "t tick", "middle"))
        for value, words in self.y.ticks():
            y = self.y(value)
            parts.append(line(self.left, y, right, y, "grid"))
            parts.append(text(self.left - 6, y + 4, words, "t tick", "end"))
        parts.append(line(self.left, bottom, right, bottom, "axis"))
        parts.append(text((self.left + right) / 2, self.height - 8, self.x_title, "t name", "middle"))
        # The name of the upright axis lies flat above it: nobody has to turn the head.
        parts.append(text(4, 14, self.y_title, "t name"))
        return parts

    def _labels(self, marks: Sequence[Mark]) -> list[Html]:
        """Each label in the first free place around its mark, with a line to it where that is further off; one that
        has none is left to the tooltip."""
        taken = [
            (self.x(m.x) - r, self.y(m.y) - r, self.x(m.x) + r, self.y(m.y) + r)
            for m in marks
            for r in [_reach(m)]
        ]
        bars = [
            (self.x(m.x) - 1, min(ends_), self.x(m.x) + 1, max(ends_))
            for m in marks
            if m.y_error and (ends_ := [self.y(self._inside(self.y, v)) for v in m.y_error])
        ]
        parts = []
        for mark in sorted((m for m in marks if m.label), key=lambda m: not m.emphasis):
            assert mark.label is not None
            x, y, gap = self.x(mark.x), self.y(mark.y), _reach(mark) + 3
            width = _LABEL_CHARACTER[mark.emphasis] * len(mark.label)
            beside = [(x + gap, y + 4, "start"), (x - gap, y + 4, "end")]
            beside += [(x, y - gap - 3, "middle"), (x, y + gap + 11, "middle")]
            beside += [
                (x + side * gap, y + 4 + way * step, "start" if side > 0 else "end")
                for step in (14, 28, 42)
                for way in (-1, 1)
                for side in (1, -1)
            ]
            # On an error bar only where there is no other place.
            for obstacles, (place, base, anchor) in product((bars, []), beside):
                left = place - {"start": 0, "middle": width / 2, "end": width}[anchor]
                box = (left, base - 10, left + width, base + 2)
                if self._free(box, [*taken, *obstacles]):
                    taken.append(box)
                    if abs(base - 4 - y) > 20 and anchor != "middle":
                        parts.append(line(x, y, place, base - 4, "leader"))
                    kind = "t label" + (" loud" if mark.emphasis else "")
                    parts.append(text(place, base, mark.label, kind, anchor))
                    break
        return parts

    def _free(
        self, box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]]
    ) -> bool:
        left, top, right, bottom = box
        if left < self.left or right > self.width or top < self.top - 3 or bottom > self.height - self.bottom:
            return False
        return all(right <= a or left >= c or bottom <= b or top >= d for a, b, c, d in taken)


def drawing(
    title: str, width: float, height: float, *parts: Html, class_: str | None = None, **data: str
) -> Html:
    """An SVG that fills its column, and never grows beyond a comfortable size."""
    return tag(
        "svg",
        *parts,
        viewbox=f"0 0 {places(width)} {places(height)}",
        role="group",
        aria_label=title,
        class_=class_,
        style=f"max-width:{places(1.25 * width)}px",
        **data,
    )


def legend(entries: Sequence[tuple[str, str, str]]) -> Html:
    """(label, shape, colour) in a line that wraps; a shape of `line` or `dash` stands for a curve."""
    items = []
    for label, shape, colour in entries:
        if shape in ("line", "dash"):
            mark = polyline([(0, 7), (20, 7)], f"line {colour}{' dashed' if shape == 'dash' else ''}")
            width = 20
        else:
            mark = tag("path", d=outline(shape, 7, 7, 4.5), class_=f"m {colour}")
            width = 14
        icon = tag("svg", mark, width=width, height=14, viewbox=f"0 0 {width} 14", aria_hidden="true")
        items.append(tag("li", icon, label))
    return tag("ul", *items, class_="legend")


def figure(
    title: str, body: Html, caption: object = None, key: Html | None = None, wide: bool = False
) -> Html:
    heading = tag("figcaption", tag("b", title), *([" ", tag("span", caption)] if caption else []))
    return tag("figure", join([heading, key, body]), class_="wide" if wide else None)
