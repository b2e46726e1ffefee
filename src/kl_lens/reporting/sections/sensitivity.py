"""What each component does to the output, over the network and by kind, for the target that the reader chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.figures.heatmap import heatmaps
from kl_lens.reporting.figures.kinds import by_kind
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import chosen, paragraph
from kl_lens.run.records import Component, Measurement

TITLE = "Sensitivity"


def section(view: RunView) -> Section | None:
    of = [(space.title, space.table, space.noise) for space in view.spaces.values()]
    if not of and view.table:
        of = [("weights alone", view.table, view.noise)]
    measured = [
        (title, [m for m in table.measurements if KL in m.metrics], noise) for title, table, noise in of
    ]
    panels = [(title, _maps(view.components, found, noise)) for title, found, noise in measured if found]
    if not panels:
        return None
    tokens = max(m.tokens for _, found, _ in measured for m in found)
    words = (
        "One component at a time is quantized, all others stay as they are. The maps show how far the distribution of "
        f"the next token moves: the mean KL over {tokens:,} tokens of calibration text."
        if tokens
        else "Published measurements, imported: how far each component alone moves the output."
    )
    return Section("sensitivity", TITLE, join([paragraph(words), chosen("heat", "For", panels)]))


def _maps(components: Sequence[Component], measurements: Sequence[Measurement], noise: float | None) -> Html:
    kinds = tag("div", by_kind(components, measurements, noise), class_="grid")
    return join([heatmaps(components, measurements, noise), kinds])
