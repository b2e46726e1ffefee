"""States and caches: what each block's loses in each format, and whether it grows along the text."""

from __future__ import annotations

import math

from kl_lens.reporting import charts
from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.markup import Section, figure, join, note
from kl_lens.reporting.names import size, with_error
from kl_lens.reporting.sections.prediction import position_chart
from kl_lens.run.positions import PositionCurve
from kl_lens.run.records import KINDS, STATE, Estimate


def section(view: RunView) -> Section | None:
    if not view.states:
        return None
    parts = [figure("What each state or cache loses alone, by block", _map(view).svg())]
    for kind in KINDS:
        if curves := _curves(view, kind):
            title = f"{kind.capitalize()} of all blocks, by position (sums)"
            parts.append(figure(title, position_chart(view.nats, curves).svg()))
    shapes = {c.name: c.shape for c, _, _ in view.states if c.kind == STATE}
    if shapes:
        in_float32 = 4 * sum(map(math.prod, shapes.values()))
        words = f"llama.cpp and OpenVINO keep recurrent states in float32: {size(in_float32)} per sequence."
        parts.append(
            note(f"{words} fp16 would need half of it, int8 a little over a quarter.")
        )
    return Section("states", "States and caches", join(parts))


def _map(view: RunView) -> charts.Chart:
    levels = charts.axis("", [m.metrics[KL].value for _, m, _ in view.states], log=True)
    shown = []
    for c, m, curve in view.states:
        words = f"{c.name}\n{m.format}: KL {with_error(m.metrics[KL])}\n{curve.trend} along the text"
        level = f"h{levels.level(m.metrics[KL].value)}"
        shown.append(charts.Cell(f"{c.kind} {m.format}", c.block, level, words))
    return charts.grid_map(shown)


def _curves(view: RunView, kind: str) -> dict[str, PositionCurve]:
    """Format → the sum over all blocks; errors are added, which is an upper bound."""
    curves: dict[str, PositionCurve] = {}
    for m, curve in ((m, curve) for c, m, curve in view.states if c.kind == kind):
        before = (
            curves[m.format].means
            if m.format in curves
            else [Estimate(0.0, 0.0)] * len(curve.means)
        )
        pairs = zip(before, curve.means, strict=True)
        means = tuple(
            Estimate(a.value + b.value, a.standard_error + b.standard_error)
            for a, b in pairs
        )
        curves[m.format] = PositionCurve(curve.starts, means, curve.slope, curve.windows)
    return curves
