"""Section 2: what each component does to the output, over the network and by kind."""

from __future__ import annotations

from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.figures.heatmap import heatmaps
from kl_lens.reporting.figures.kinds import by_kind
from kl_lens.reporting.markup import join, tag
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import paragraph

TITLE = "Sensitivity"


def section(view: RunView) -> Section:
    measurements = [m for m in view.table.measurements if KL in m.metrics] if view.table else []
    if not measurements:
        where = "ANOTHER_DIR" if view.table else view.folder
        reason = "the run holds no KL measurements" if view.table else "nothing has been measured"
        return Section("sensitivity", TITLE, None, f"kl-lens measure MODEL --run {where}", reason)
    tokens = max(m.tokens for m in measurements)
    parts = [
        paragraph(
            "One component at a time is quantized and everything else left alone: how far does the distribution of the "
            f"next token move? Mean over {tokens:,} tokens of calibration text."
            if tokens
            else "Published measurements, imported: how far each component alone moves the output."
        ),
        heatmaps(view.components, measurements, view.noise),
        tag("div", by_kind(view.components, measurements, view.noise), class_="grid"),
    ]
    return Section("sensitivity", TITLE, join(parts))
