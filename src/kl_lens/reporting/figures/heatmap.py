"""Sensitivity over the network: component kinds down, blocks across, one map for each format."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from kl_lens.reporting.data import KL
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.numbers import number, with_error
from kl_lens.reporting.palette import RAMP_STEPS, ramp_class
from kl_lens.reporting.scales import Scale, logarithmic
from kl_lens.reporting.svg import CHARACTER, drawing, figure, line, places, text, titled
from kl_lens.run.records import Component, Measurement

_ROW, _GAP = 22.0, 1.5
_WIDTH, _WIDE = 460.0, 864.0
_SHALLOW = 24  # blocks that fit into a figure of half the page's width
_NARROWEST = 11.0  # of a column; a deep network scrolls within its figure


def rows_of(components: Sequence[Component]) -> dict[str, str]:
    """Component → the row it stands in: its kind, or its name within the block where a block has several of a kind."""
    count = Counter((c.kind, block) for c in components for block in places_of(c))
    crowded = {kind for (kind, _), n in count.items() if n > 1}
    return {c.name: _within_block(c.name) if c.kind in crowded else c.kind for c in components}


def places_of(component: Component) -> tuple[int | None, ...]:
    """The blocks that use a weight; (None,) for one outside the blocks."""
    return component.blocks or (component.block,)


def _within_block(name: str) -> str:
    return re.sub(r"^.*?\.\d+\.", "", name)


def damage_scale(measurements: Sequence[Measurement]) -> Scale:
    """One logarithmic scale for all maps of a run, so that they can be compared."""
    values = [m.metrics[KL].value for m in measurements if KL in m.metrics]
    return logarithmic(values, margin=0.0).placed(0.0, 1.0)


def heatmaps(
    components: Sequence[Component], measurements: Sequence[Measurement], noise: float | None
) -> Html:
    """One map per format, and the key that they share."""
    scale = damage_scale(measurements)
    by_format: dict[str, dict[str, Measurement]] = {}
    for measurement in measurements:
        if KL in measurement.metrics:
            by_format.setdefault(measurement.format, {})[measurement.component] = measurement
    maps = [
        figure(name, _map(name, components, of_format, scale, noise), wide=True)
        for name, of_format in by_format.items()
    ]
    return join(
        [_key(scale, noise), tag("div", *maps, class_="grid" if _blocks(components) <= _SHALLOW else None)]
    )


def _blocks(components: Sequence[Component]) -> int:
    return 1 + max((b for c in components for b in places_of(c) if b is not None), default=0)


def _map(
    format_name: str,
    components: Sequence[Component],
    measurements: Mapping[str, Measurement],
    scale: Scale,
    noise: float | None,
) -> Html:
    shown = [c for c in components if c.name in measurements]
    rows = rows_of(shown)
    inside = list(dict.fromkeys(rows[c.name] for c in shown if c.block is not None))
    outside = [c for c in shown if c.block is None]
    blocks = _blocks(shown)
    left = 12 + CHARACTER * max((len(name) for name in [*inside, *(c.kind for c in outside)]), default=6)
    step = max(_NARROWEST, ((_WIDTH if blocks <= _SHALLOW else _WIDE) - left - 6) / blocks)
    width = left + step * blocks + 6
    cells, words = [], []
    for index, row in enumerate(inside):
        words.append(text(left - 8, _ROW * index + 15, row, "t tick", "end"))
    for component in shown:
        for block in places_of(component) if component.block is not None else ():
            assert block is not None
            x, y = left + step * block, _ROW * inside.index(rows[component.name])
            cells.append(_cell(measurements[component.name], block, scale, noise, x, y, step))
    bottom = _ROW * len(inside)
    for value in _every(blocks):
        words.append(text(left + step * (value + 0.5), bottom + 14, value, "t tick", "middle"))
    words.append(text(left - 8, bottom + 14, "block", "t name", "end"))
    top = bottom + 24
    for component in outside:
        words.append(text(left - 8, top + 15, component.kind, "t tick", "end"))
        cells.append(_cell(measurements[component.name], None, scale, noise, left, top, step * blocks))
        top += _ROW
    svg = drawing(
        f"KL of each component at {format_name}", width, top + 2, tag("g", *cells, class_="marks"), *words
    )
    # Below this width the labels would be too small to read: the figure scrolls instead.
    return tag(
        "div", svg, class_="scroll", style=f"--least:{places(0.75 * width if blocks > _SHALLOW else 0)}px"
    )


def _every(blocks: int) -> range:
    return range(0, blocks, 1 if blocks <= 16 else 4 if blocks <= 40 else 8)


def _cell(
    measurement: Measurement,
    block: int | None,
    scale: Scale,
    noise: float | None,
    x: float,
    y: float,
    width: float,
) -> Html:
    estimate = measurement.metrics[KL]
    where = "" if block is None or f".{block}." in measurement.component else f", block {block}"
    title = f"{measurement.component}{where}\n{measurement.format}: KL {with_error(estimate)} nats/token"
    buried = noise is not None and estimate.value <= noise
    if buried:
        title += "\nwithin the noise of measuring"
    box = f"M{places(x)} {places(y)}h{places(width - _GAP)}v{places(_ROW - _GAP)}h{places(_GAP - width)}z"
    share = 1.0 if math.isinf(estimate.value) else scale(estimate.value) if estimate.value > 0 else 0.0
    cell = titled(f"cell {ramp_class(share)}", title, box)
    return join([cell, tag("path", d=box, class_="hatch")]) if buried else cell


def _key(scale: Scale, noise: float | None) -> Html:
    """The ramp with its numbers, and where the noise floor lies on it."""
    width, left, right = 460.0, 16.0, 444.0
    step = (right - left) / RAMP_STEPS
    parts = [
        tag("rect", x=places(left + step * i), y=20, width=places(step + 0.3), height=12, class_=f"cell h{i}")
        for i in range(RAMP_STEPS)
    ]
    placed = scale.placed(left, right)
    for value, words in placed.ticks():
        parts += [
            line(placed(value), 32, placed(value), 36, "axis"),
            text(placed(value), 48, words, "t tick", "middle"),
        ]
    parts.append(text(left, 13, "KL(original ‖ quantized), nats per token", "t name"))
    words = ""
    if noise == 0:
        words = "noise floor 0: the original, measured twice, gives the very same numbers"
    elif noise is not None:
        words = f"noise floor {number(noise)} nats"
        if placed.low < noise < placed.high:
            parts.append(line(placed(noise), 16, placed(noise), 36, "rule"))
            words += " (dashed line); cells at or below it are hatched"
        elif noise <= placed.low:
            words += ", left of the scale"
        else:
            words += ", right of the scale: every cell is within it, and hatched"
    note = tag(
        "p", f"Same scale for all maps; {words}." if words else "Same scale for all maps.", class_="note"
    )
    return tag("div", drawing("Scale of the maps", width, 52, *parts, class_="key"), note, class_="ramp")
