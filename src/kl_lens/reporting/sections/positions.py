"""Does the loss grow along the text?"""

from __future__ import annotations

from collections.abc import Iterable

from kl_lens.positions import GROWS, PositionCurve, curve_of
from kl_lens.records import ORIGINAL
from kl_lens.reporting.data import RunView
from kl_lens.reporting.figures.positions import position_plot
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import number, with_error
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import details, grid, paragraph
from kl_lens.reporting.tables import Column, table, text_column


def section(view: RunView) -> Section | None:
    parts = [*_judged(view), *_components(view)]
    return Section("positions", "Does the loss grow along the text?", join(parts)) if parts else None


def _judged(view: RunView) -> list[Html]:
    """Plans and files, text by text."""
    parts = []
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
            _table(("model",), (((name,), curve) for name, curve in lost.items())),
        ]
    return parts


def _components(view: RunView) -> list[Html]:
    """Components of `measure --positions`, and how many of each family grow."""
    if not view.position_curves:
        return []
    families = {component.name: component.family for component in view.components}
    counts: dict[str, list[bool]] = {}
    for (component, _), curve in view.position_curves.items():
        counts.setdefault(families.get(component, "other"), []).append(curve.trend == GROWS)
    grown = "; ".join(f"{family} {sum(each)} of {len(each)}" for family, each in counts.items())
    return [
        paragraph(
            f"Components alone: KL grows with 95 % confidence for {grown}. By chance alone about 2.5 % would."
        ),
        details(
            "Every component by position",
            _table(("component", "format"), view.position_curves.items()),
        ),
    ]


def _table(names: tuple[str, ...], curves: Iterable[tuple[tuple[str, ...], PositionCurve]]) -> Html:
    columns = [
        *map(text_column, names), Column("first stretch"), Column("last stretch"),
        Column("slope per 1,000 tokens"), text_column("trend"),
    ]  # fmt: skip
    rows = [
        [*key, number(c.means[0].value), number(c.means[-1].value), with_error(c.slope), c.trend]
        for key, c in curves
    ]
    return table(columns, rows, caption="KL by position")
