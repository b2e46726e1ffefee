"""Does the loss grow along the text?"""

from __future__ import annotations

from collections.abc import Mapping

from kl_lens.reporting.charts import SERIES, Chart, Dot, Line, axis, scatter
from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, Section, figure, grid, join, table, tag
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import number, with_error
from kl_lens.run.positions import PositionCurve, curve_of
from kl_lens.run.records import ORIGINAL


def section(view: RunView) -> Section | None:
    """Plans and files, text by text."""
    parts: list[Html] = []
    scores = [score for score in view.scores if score.kind == "positions"]
    for what in dict.fromkeys((score.what, score.protocol["window"]) for score in scores):
        chosen = [score for score in scores if (score.what, score.protocol["window"]) == what]
        lost = {subject_title(s.subject): c for s in chosen if (c := curve_of(s, "kl"))}
        own = {
            subject_title(s.subject): c
            for s in chosen
            if s.subject.what == ORIGINAL and (c := curve_of(s, "cross_entropy"))
        }
        shown = [("KL from the original", lost), ("Cross-entropy", own)]
        parts += [
            tag(
                "p",
                f"{what[0]}, windows of {what[1]:,} tokens: the mean of each stretch of positions. Slopes are taken in "
                "each window, their errors over windows. Where the cross-entropy of the original itself rises, "
                "the model is beyond the length that it was trained for.",
            ),
            grid(figure(title, _chart(view.nats, curves).svg()) for title, curves in shown if curves),
            _table(lost),
        ]
    return Section("positions", "Does the loss grow along the text?", join(parts)) if parts else None


def _chart(nats: str, curves: Mapping[str, PositionCurve]) -> Chart:
    """One line per model or plan; error bars: one standard error over windows."""
    starts = next(iter(curves.values())).starts
    width = starts[1] if len(starts) > 1 else 1
    dots, lines = [], []
    for index, (name, curve) in enumerate(curves.items()):
        points = [(start + width / 2, mean.value) for start, mean in zip(starts, curve.means, strict=True)]
        lines.append(Line(points, f"s{index % len(SERIES)}"))
        for (x, y), mean, start in zip(points, curve.means, starts, strict=True):
            words = f"{name}\npositions {start:,} to {start + width:,}: {with_error(mean)} {nats}"
            error = mean.standard_error if mean.standard_error == mean.standard_error else 0.0
            dots.append(Dot(x, y, words, name, y - error, y + error))
    across = axis("position in the window, tokens", [0, starts[-1] + width], log=False)
    return scatter(across, axis(nats, [d.y for d in dots]), dots, lines)


def _table(curves: Mapping[str, PositionCurve]) -> Html:
    columns = ["model", "first stretch", "last stretch", "slope per 1,000 tokens", "trend"]
    rows = [
        [name, number(c.means[0].value), number(c.means[-1].value), with_error(c.slope), c.trend]
        for name, c in curves.items()
    ]
    return table(columns, rows, caption="KL by position")
