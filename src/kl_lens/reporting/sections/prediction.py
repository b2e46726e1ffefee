"""Does KL on calibration text predict the damage on held-out text? Does the loss grow along the text?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kl_lens.judging.ranking import Ranking
from kl_lens.reporting.charts import SERIES, Chart, Dot, Line, axis, scatter
from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.markup import (
    Html,
    Section,
    details,
    figure,
    join,
    note,
    table,
    tag,
)
from kl_lens.reporting.names import number, subject_title, with_error
from kl_lens.run.positions import PositionCurve, curve_of

METRIC_NAMES = {
    "kl_teacher_to_student": "KL",
    "kl_student_to_teacher": "reverse KL",
    "mse": "MSE of logits",
    "sqnr_db": "SQNR",
    "delta_cross_entropy": "Δ cross-entropy",
}


def section(view: RunView) -> Section | None:
    ranking = view.ranking
    if ranking is None or not ranking.points:
        return None
    text = view.unit.text
    formats = list(dict.fromkeys(p.format for p in ranking.points))
    charts = [
        figure(f, _damage(view, ranking, f).svg(), _caption(ranking, f)) for f in formats
    ]
    damages = {
        "perplexity": "change in perplexity",
        "divergence": f"KL on held-out {text}",
    }
    parts = [
        tag(
            "p",
            f"Each dot is one component in one format: its KL on calibration {text} against what it does to "
            f"{ranking.evaluation_tokens:,} {view.unit.one}s of held-out {text}, where the original's "
            f"{view.unit.perplexity} is {ranking.perplexity:.2f}. Bars: one standard error, paired with the original.",
        ),
        tag("div", *charts, class_="grid"),
        *_reliability(ranking, text),
        details(
            f"Every metric, with little and with foreign calibration {text}",
            _table(ranking, damages),
        ),
    ]
    return Section("prediction", "Does KL predict the damage?", join(parts))


def _damage(view: RunView, ranking: Ranking, format_name: str) -> Chart:
    """KL on calibration text against the change in perplexity on held-out text."""
    shown = [
        p
        for p in ranking.points
        if p.format == format_name and KL in p.metrics and p.metrics[KL].value > 0
    ]
    changes = [p.delta_perplexity for p in shown]
    errors = sorted(
        c.standard_error
        for c in changes
        if math.isfinite(c.standard_error) and c.standard_error > 0
    )
    reach = max((abs(c.value) for c in changes if math.isfinite(c.value)), default=1.0)
    usual = errors[len(errors) // 2] if errors else reach / 100
    # Linear within the usual error, logarithmic beyond.
    around = usual if reach > 20 * usual else 0.0
    few = len(shown) <= 150  # or the page grows by a megabyte
    dots = [
        Dot(
            p.metrics[KL].value,
            c.value,
            few
            * (
                f"{p.component}\n{format_name}: KL {with_error(p.metrics[KL])} {view.nats}\n"
                f"change in perplexity {with_error(c)}"
            ),
            "the head" if p.is_head else "components",
            *((c.value - c.standard_error, c.value + c.standard_error) if few else ()),
        )
        for p, c in zip(shown, changes, strict=True)
        if math.isfinite(c.value)
    ]
    x = axis(
        f"KL on calibration {view.unit.text}, {view.nats}", [d.x for d in dots], log=True
    )
    ends = [
        v
        for d in dots
        for v in (d.y, d.low, d.high)
        if v is not None and math.isfinite(v)
    ]
    y = axis(
        "change in perplexity" + (" (log beyond its error)" if around else ""),
        [0.0, *ends],
        log=False,
        around=around,
    )
    return scatter(x, y, dots, [Line([(x.low, 0.0), (x.high, 0.0)])])


def _caption(ranking: Ranking, format_name: str) -> str:
    wanted = (True, "perplexity", format_name, KL)
    best = next(
        (
            c
            for c in ranking.correlations
            if (c.with_head, c.damage, c.format, c.metric) == wanted
        ),
        None,
    )
    if best is None:
        return ""
    interval = f"95 % interval {best.low:.2f} to {best.high:.2f}"
    return f"Kendall's τ {best.tau:.2f} ({interval}), {best.candidates} components."


def _reliability(ranking: Ranking, text: str) -> list[Html]:
    """Where noise limits every τ."""
    return [
        note(
            f"{r.format}: two halves of the held-out {text} agree only with τ {r.split_half_tau:.2f}; more ",
            tag("code", "--evaluation-windows"),
            " would help.",
        )
        for r in ranking.reliabilities
        if r.with_head and r.is_noisy
    ]


def _table(ranking: Ranking, damages: dict[str, str]) -> Html:
    columns = [
        "damage",
        "format",
        "head",
        "calibration",
        "metric",
        "candidates",
        "τ",
        "low",
        "high",
        "p",
    ]
    rows = [
        [
            damages.get(c.damage, c.damage),
            c.format,
            "with" if c.with_head else "without",
            c.calibration,
            METRIC_NAMES.get(c.metric, c.metric),
            c.candidates,
            f"{c.tau:.3f}",
            f"{c.low:.3f}",
            f"{c.high:.3f}",
            f"{c.p_value:.1e}",
        ]
        for c in ranking.correlations
    ]
    return table(columns, rows, caption="Kendall's τ of every metric with the damage")


# -- along the text ------------------------------------------------------------------------------------------


def positions(view: RunView) -> Section | None:
    """Plans and files, text by text."""
    parts: list[Html] = []
    scores = [score for score in view.scores if score.kind == "positions"]
    for key in dict.fromkeys((score.what, score.protocol["window"]) for score in scores):
        chosen = [
            score for score in scores if (score.what, score.protocol["window"]) == key
        ]
        lost = {subject_title(s.subject): c for s in chosen if (c := curve_of(s, "kl"))}
        if lost:
            words = f"{key[0]}, windows of {key[1]:,} tokens: the mean of each stretch of positions."
            parts += [
                tag(
                    "p",
                    words,
                    " Slopes are taken in each window, their errors over windows.",
                ),
                figure("KL from the original", position_chart(view.nats, lost).svg()),
                _position_table(lost),
            ]
    return (
        Section("positions", "Does the loss grow along the text?", join(parts))
        if parts
        else None
    )


def position_chart(nats: str, curves: Mapping[str, PositionCurve]) -> Chart:
    """One line per model or plan; error bars: one standard error over windows."""
    starts = next(iter(curves.values())).starts
    width = starts[1] if len(starts) > 1 else 1
    dots = []
    lines = []
    for index, (name, curve) in enumerate(curves.items()):
        points = [
            (start + width / 2, mean.value)
            for start, mean in zip(starts, curve.means, strict=True)
        ]
        lines.append(Line(points, f"s{index % len(SERIES)}"))
        for (x, y), mean, start in zip(points, curve.means, starts, strict=True):
            words = f"{name}\npositions {start:,} to {start + width:,}: {with_error(mean)} {nats}"
            error = (
                mean.standard_error if mean.standard_error == mean.standard_error else 0.0
            )
            dots.append(Dot(x, y, words, name, y - error, y + error))
    across = axis("position in the window, tokens", [0, starts[-1] + width], log=False)
    return scatter(across, axis(nats, [d.y for d in dots]), dots, lines)


def _position_table(curves: Mapping[str, PositionCurve]) -> Html:
    columns = [
        "model",
        "first stretch",
        "last stretch",
        "slope per 1,000 tokens",
        "trend",
    ]
    rows = [
        [
            name,
            number(c.means[0].value),
            number(c.means[-1].value),
            with_error(c.slope),
            c.trend,
        ]
        for name, c in curves.items()
    ]
    return table(columns, rows, caption="KL by position")
