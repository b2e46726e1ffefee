"""Section 2: what each component does to the output, over the network, by kind, and at both ends of the list."""

from __future__ import annotations

import math

from kl_lens.records import Measurement, SensitivityTable
from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.figures.heatmap import heatmaps
from kl_lens.reporting.figures.kinds import by_kind
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.numbers import number, with_error
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import note, paragraph
from kl_lens.reporting.tables import Column, table, text_column

TITLE = "Sensitivity"
LISTED = 8


def section(view: RunView) -> Section:
    if view.table is None:
        return Section(
            "sensitivity",
            TITLE,
            None,
            f"kl-lens measure MODEL --run {view.folder}",
            "nothing has been measured",
        )
    measurements = [m for m in view.table.measurements if KL in m.metrics]
    if not measurements:
        return Section(
            "sensitivity",
            TITLE,
            None,
            "kl-lens measure MODEL --run ANOTHER_DIR",
            "the run holds no KL measurements",
        )
    tokens = max(m.tokens for m in measurements)
    parts = [
        paragraph(
            "One component at a time is quantized and everything else left alone: how far does the distribution of the "
            f"next token move? Mean over {tokens:,} tokens of calibration text."
            if tokens
            else "Published measurements, imported: how far each component alone moves the output."
        ),
        heatmaps(view.components, measurements, view.noise),
        tag(
            "div",
            by_kind(view.components, measurements, view.noise),
            *_ends(view.table, measurements),
            class_="columns",
        ),
    ]
    return Section("sensitivity", TITLE, join(parts))


def _ends(table_: SensitivityTable, measurements: list[Measurement]) -> list[Html]:
    """For each format, both ends of the list."""
    columns = [
        Column("#"),
        text_column("component"),
        Column("KL, nats/token"),
        Column("share"),
    ]
    lists = []
    for format_name in table_.formats:
        ordered = sorted((m for m in measurements if m.format == format_name), key=_order)
        if not ordered:
            continue
        total = sum(m.metrics[KL].value for m in ordered)
        rows = [_row(rank, m, total) for rank, m in enumerate(ordered, 1)]
        if len(rows) > 2 * LISTED:
            between = f"… {len(rows) - 2 * LISTED} between …"
            rows = [*rows[:LISTED], ["", between, "", ""], *rows[-LISTED:]]
        body = table(columns, rows, sortable=False, caption=f"{format_name}: most and least sensitive")
        words = f"All {len(ordered)} together {number(total)} nats per token, if damage adds up."
        lists.append(tag("div", body, note(words) if math.isfinite(total) else "", class_="figure"))
    return lists


def _row(rank: int, m: Measurement, total: float) -> list[object]:
    estimate = m.metrics[KL]
    share = 100 * estimate.value / total if total > 0 and math.isfinite(total) else math.nan
    words = "–" if math.isnan(share) else f"{share:.2f} %" if share >= 0.005 else "< 0.01 %"
    return [rank, m.component, with_error(estimate), words]


def _order(m: Measurement) -> float:
    """Most sensitive first; what is no number goes last."""
    value = m.metrics[KL].value
    return math.inf if math.isnan(value) else -value
