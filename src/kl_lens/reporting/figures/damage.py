"""Does the metric predict the damage? One dot per candidate, and τ with its interval for every metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kl_lens.measuring.correlation import Correlation, Point
from kl_lens.reporting.data import KL
from kl_lens.reporting.markup import Html, tag
from kl_lens.reporting.numbers import with_error
from kl_lens.reporting.palette import format_class, series_class
from kl_lens.reporting.scales import Scale, logarithmic, twosided
from kl_lens.reporting.svg import (
    CHARACTER,
    SHAPES,
    Mark,
    Plot,
    drawing,
    ends,
    figure,
    legend,
    line,
    outline,
    text,
    titled,
)
from kl_lens.run.records import METRICS

METRIC_NAMES = {
    "kl_teacher_to_student": "KL",
    "kl_student_to_teacher": "reverse KL",
    "mse": "MSE of logits",
    "sqnr_db": "SQNR",
    "delta_cross_entropy": "Δ cross-entropy",
}
_LANE = 12.0


def damage_scatter(format_name: str, points: Sequence[Point], caption: str) -> Html:
    """KL on calibration text against the change in perplexity on held-out text."""
    shown = [p for p in points if KL in p.metrics and p.metrics[KL].value > 0]
    changes = [p.delta_perplexity for p in shown]
    reach = [v for c in changes for v in (ends(c) or (c.value,))]
    y = twosided(reach, [c.standard_error for c in changes])
    kind = " (linear near 0, logarithmic beyond)" if y.kind == "twosided" else ""
    plot = Plot(
        f"KL against change in perplexity, {format_name}",
        logarithmic([p.metrics[KL].value for p in shown]),
        y,
        "KL on calibration text, nats per token",
        f"change in perplexity on held-out text{kind}",
    )
    plot.below.append(line(plot.left, plot.y(0), plot.width - plot.right, plot.y(0), "axis"))
    worst = sorted(shown, key=lambda p: -p.delta_perplexity.value)[:1]
    for point in shown:
        plot.marks.append(
            Mark(
                point.metrics[KL].value,
                point.delta_perplexity.value,
                f"{point.component}\n{format_name}: KL {with_error(point.metrics[KL])} nats/token\n"
                f"change in perplexity {with_error(point.delta_perplexity)}",
                format_class(format_name),
                "square" if point.is_head else "circle",
                3.6,
                y_error=ends(point.delta_perplexity) if len(shown) <= 150 else None,
                label=_short(point.component) if point in worst or point.is_head else None,
            )
        )
    return figure(format_name, plot.render(), caption)


def _short(component: str) -> str:
    words = component.split(".")
    return ".".join(words[-3:]) if len(words) > 3 else component


def tau_rows(title: str, correlations: Sequence[Correlation]) -> Html:
    """τ and its 95 % interval: metrics down, calibrations in lanes."""
    calibrations = list(dict.fromkeys(c.calibration for c in correlations))
    metrics = list(dict.fromkeys(c.metric for c in correlations))
    finite = [v for c in correlations for v in (c.low, c.high, c.tau) if math.isfinite(v)]
    low = min([0.0, *finite])
    scale = Scale("linear", math.floor(low * 5) / 5, 1.0)
    left = 12 + CHARACTER * max(len(METRIC_NAMES.get(m, m)) for m in metrics)
    width, top = 460.0, 8.0
    height = top + len(metrics) * (_LANE * len(calibrations) + 9) + 40
    scale, bottom = scale.placed(left, width - 14), height - 40
    parts: list[Html] = []
    for value, words in scale.ticks():
        parts += [line(scale(value), top, scale(value), bottom, "axis" if value == 0 else "grid")]
        parts += [text(scale(value), bottom + 15, words, "t tick", "middle")]
    parts += [
        text(
            (left + width) / 2, height - 6, "Kendall's τ with the damage (95 % interval)", "t name", "middle"
        )
    ]
    marks, y = [], top + 3
    for metric in metrics:
        label = METRIC_NAMES.get(metric, metric)
        parts.append(text(left - 8, y + _LANE * len(calibrations) / 2 + 4, label, "t tick", "end"))
        for index, calibration in enumerate(calibrations):
            y += _LANE
            shown = next(
                (c for c in correlations if (c.metric, c.calibration) == (metric, calibration)), None
            )
            if shown is None or not math.isfinite(shown.tau):
                continue
            colour, shape = series_class(index), SHAPES[index % len(SHAPES)]
            if math.isfinite(shown.low):
                parts.append(line(scale(shown.low), y - 6, scale(shown.high), y - 6, f"err {colour}"))
            words = f"{METRICS.get(metric, label)}\nτ {shown.tau:.3f}, 95 % interval {shown.low:.3f} to "
            words += f"{shown.high:.3f}\n{shown.candidates} candidates; {calibration}"
            marks.append(titled(f"m {colour}", words, outline(shape, scale(shown.tau), y - 6, 4)))
        y += 9
        parts.append(line(left, y - 4, width - 14, y - 4, "grid"))
    body = drawing(title, width, height, *parts, tag("g", *marks, class_="marks"))
    key = legend([(c, SHAPES[i % len(SHAPES)], series_class(i)) for i, c in enumerate(calibrations)])
    return figure(title, body, key=key)
