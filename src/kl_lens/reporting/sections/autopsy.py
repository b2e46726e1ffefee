"""What autopsies found in files."""

from __future__ import annotations

from pathlib import Path

from kl_lens.evaluation.autopsy import Autopsy
from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.numbers import number, size, with_error
from kl_lens.reporting.sections.words import Section, heading, note, paragraph
from kl_lens.reporting.tables import table

TITLE = "Autopsies"


def section(view: RunView) -> Section | None:
    if not view.autopsies:
        return None
    return Section("autopsies", TITLE, join(_autopsy(view, found) for found in view.autopsies))


def _autopsy(view: RunView, found: Autopsy) -> Html:
    rows = [
        [step.letter, step.title, with_error(step.kl), with_error(step.apart), step.failure or step.note]
        for step in found.steps
    ]
    columns = ["", "step", "KL", "apart", ""]
    items = [
        tag("li", tag("b", "Wrong: " if finding.is_fault else "Note: "), finding.words,
            "" if finding.kl is None else f" ({number(finding.kl)} nats)", ". ", finding.advice)
        for finding in found.findings
    ]  # fmt: skip
    planned = None
    if found.planned_kl is not None:
        bytes_ = size(found.planned_bytes or found.bytes)
        planned = paragraph(
            f"Our plan from this run: KL {with_error(found.planned_kl)} at {bytes_}, in PyTorch."
        )
    return join([
        heading(f"{Path(found.file).name}, {size(found.bytes)}"), paragraph(tag("b", found.headline)),
        tag("ul", *items) if items else None,
        table(columns, rows, sortable=False, caption=f"Step by step on {found.text}"), planned,
        note("Each step changes one thing. ± is one standard error over windows."),
    ])  # fmt: skip
