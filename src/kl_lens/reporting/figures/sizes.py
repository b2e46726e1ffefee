"""Size against quality: every plan in one picture, with the frontier, and predictions against measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kl_lens.reporting.markup import Html
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.numbers import number, size, with_error
from kl_lens.reporting.palette import series_class
from kl_lens.reporting.plans import FAMILIES, PlanView
from kl_lens.reporting.scales import Scale, by_span, linear, logarithmic
from kl_lens.reporting.svg import Mark, Plot, ends, figure, legend
from kl_lens.run.records import ORIGINAL, Estimate

_STYLES = {
    ORIGINAL: (series_class(5), "plus"),
    "uniform": (series_class(0), "square"),
    "paper": (series_class(1), "circle"),
    "exact": (series_class(2), "triangle"),
    "greedy": (series_class(4), "down"),
    "stock": (series_class(7), "plus"),
    "other": (series_class(6), "cross"),
}


@dataclass(frozen=True)
class SizePoint:
    """Something of a size and a quality."""

    name: str
    label: str
    family: str  # of FAMILIES, or ORIGINAL
    bytes: int
    quality: Estimate
    recommended: bool = False
    plan: str | None = None  # TARGET/PLAN: the script can pin it


def unit_of(count: float) -> tuple[float, str]:
    """One unit for a whole axis."""
    for divisor, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= divisor:
            return divisor, name
    return 1.0, "bytes"


def size_plot(
    title: str,
    points: Sequence[SizePoint],
    quality: str,
    caption: object = None,
    frontier: Sequence[tuple[int, float]] = (),
    logarithmic_quality: bool = False,
    target: str | None = None,
) -> Html:
    """Quality over bytes, with its key.

    Args:
        target: whose plans they are ("" for none), where the script is to show its own plan among them.
    """
    shown = [p for p in points if math.isfinite(p.quality.value)]
    plot = drawn(title, shown, quality, frontier, logarithmic_quality, target)
    return figure(title, plot.render(), caption, _legend(shown, bool(frontier)))


def drawn(
    title: str,
    shown: Sequence[SizePoint],
    quality: str,
    frontier: Sequence[tuple[int, float]] = (),
    logarithmic_quality: bool = False,
    target: str | None = None,
) -> Plot:
    """The paper's points are joined, as the paper joins them; so is the predicted frontier."""
    divisor, unit = unit_of(max(p.bytes for p in shown))
    y = _quality_scale(shown, frontier, logarithmic_quality)
    smallest = [frontier[0][0]] if frontier and target is not None else []  # the slider goes that far
    x = linear([b / divisor for b in (*(p.bytes for p in shown), *smallest)], margin=0.08)
    plot = Plot(title, x, y, f"size, {unit}", quality + _kind(y))
    if frontier:
        plot.curve([(b / divisor, kl) for b, kl in frontier], "quiet dashed")
    paper = sorted((p for p in shown if p.family == "paper"), key=lambda p: p.bytes)
    plot.curve([(p.bytes / divisor, p.quality.value) for p in paper], f"thin {_STYLES['paper'][0]}")
    for point in shown:
        colour, shape = _STYLES[point.family]
        plot.marks.append(
            Mark(
                point.bytes / divisor,
                point.quality.value,
                f"{point.name}\n{size(point.bytes)}\n{quality}: {with_error(point.quality, 4)}",
                colour,
                "star" if point.recommended else shape,
                y_error=ends(point.quality),
                label=point.label,
                emphasis=point.recommended,
                plan=point.plan,
            )
        )
    if target is not None:
        plot.data = {"data_frame": plot.frame(divisor), "data_target": target}
    return plot


def _kind(scale: Scale) -> str:
    return " (log)" if scale.kind == "log" else ""


def _quality_scale(points: Sequence[SizePoint], frontier: Sequence[tuple[int, float]], as_log: bool) -> Scale:
    values = [p.quality.value for p in points]
    if as_log:
        largest = max(p.bytes for p in points)
        return logarithmic(values + [kl for b, kl in frontier if b <= largest])
    # The ends of error bars belong into the frame, unless they would squeeze everything else.
    reach = [v for p in points for v in (ends(p.quality) or ()) if v > 0]
    spread = max(values) - min(values)
    return by_span(values + [v for v in reach if min(values) - spread <= v <= max(values) + spread])


def _legend(points: Sequence[SizePoint], frontier: bool) -> Html:
    entries = []
    for family in [ORIGINAL, *FAMILIES]:
        if any(p.family == family and not p.recommended for p in points):
            colour, shape = _STYLES[family]
            entries.append((FAMILIES.get(family, "original (FP16)"), shape, colour))
    if any(p.recommended for p in points):
        colour = next(_STYLES[p.family][0] for p in points if p.recommended)
        entries.append(("recommended", "star", colour))
    if frontier:
        entries.append(("frontier, predicted", "dash", "quiet"))
    return legend(entries)


def predicted_plot(plans: Sequence[PlanView], recommended: frozenset[str]) -> Html | None:
    """Is the sum of single damages the damage of the whole plan?"""
    shown = [
        (p, p.row.predicted_kl, p.kl)
        for p in plans
        if p.kl is not None and p.row.predicted_kl and p.row.predicted_kl > 0 and p.kl.value > 0
    ]
    if len(shown) < 2:
        return None
    both = logarithmic([v for _, predicted, kl in shown for v in (predicted, kl.value)])
    plot = Plot(
        "Predicted against measured KL",
        both,
        both,
        "predicted KL, nats per token (log)",
        "measured KL on held-out text, nats per token (log)",
    )
    plot.curve([(both.low, both.low), (both.high, both.high)], "quiet dashed")
    for plan, predicted, kl in shown:
        colour, shape = _STYLES[plan.family]
        star = plan.name in recommended
        plot.marks.append(
            Mark(
                predicted,
                kl.value,
                f"{plan.title}\npredicted {number(predicted, 4)}\nmeasured {with_error(kl, 4)}\n"
                f"measured / predicted {kl.value / predicted:.2f}",
                colour,
                "star" if star else shape,
                y_error=ends(kl),
                label=f"{plan.label}, {runtime_title(plan.target)}" if star and plan.target else plan.label,
                emphasis=star,
            )
        )
    off = sorted(kl.value / predicted for _, predicted, kl in shown)
    caption = (
        "On the dashed line, a plan loses exactly the sum of what its parts lose alone. Measured / predicted: "
        f"{off[0]:.2f} to {off[-1]:.2f}, median {off[len(off) // 2]:.2f}."
    )
    points = [SizePoint(p.title, p.label, p.family, p.bytes, kl, p.name in recommended) for p, _, kl in shown]
    return figure("Predicted against measured", plot.render(), caption, _legend(points, False))
