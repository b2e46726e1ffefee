"""Does the loss grow along the text?"""

from __future__ import annotations

from collections.abc import Mapping

from kl_lens.reporting.data import RunView
from kl_lens.reporting.figures.positions import position_plot
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import number, with_error
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import grid, paragraph
from kl_lens.reporting.tables import Column, table, text_column
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
        shown = [
            position_plot(title, "nats per token", curves)
            for title, curves in (("KL from the original", lost), ("Cross-entropy", own))
            if curves
        ]
        parts += [
            paragraph(
                f"{what[0]}, windows of {what[1]:,} tokens: the mean of each stretch of positions. Slopes are taken in "
                "each window, their errors over windows. Where the cross-entropy of the original itself rises, "
                "the model is beyond the length that it was trained for."
            ),
            grid(shown),
            _table(lost),
        ]
    return Section("positions", "Does the loss grow along the text?", join(parts)) if parts else None


def _table(curves: Mapping[str, PositionCurve]) -> Html:
    columns = [
        text_column("model"), Column("first stretch"), Column("last stretch"),
        Column("slope per 1,000 tokens"), text_column("trend"),
    ]  # fmt: skip
    rows = [
        [name, number(c.means[0].value), number(c.means[-1].value), with_error(c.slope), c.trend]
        for name, c in curves.items()
    ]
    return table(columns, rows, caption="KL by position")
