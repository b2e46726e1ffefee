"""`kl-lens export`: what was written, and what differs from the plan."""

from __future__ import annotations

import shlex
from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.pipeline.exporting import ExportResult
from kl_lens.recipes import FP16
from kl_lens.records import Artifact
from kl_lens.reporting.names import runtime_title
from kl_lens.units import human_bytes


def as_json(result: ExportResult) -> list[dict[str, Any]]:
    return [artifact.to_json() | {"folder": str(folder)} for folder, artifact in result.artifacts]


def show(result: ExportResult) -> None:
    table = new_table(
        "Exported", ("plan", "for"), ("planned", "on disk"), ("differs from the plan", "folder")
    )
    for folder, artifact in result.artifacts:
        table.add_row(
            artifact.plan,
            runtime_title(artifact.target),
            human_bytes(artifact.planned_bytes),
            human_bytes(artifact.realised_bytes),
            _lowered(artifact),
            str(folder),
        )
    out = console()
    out.print(table)
    for note in dict.fromkeys(
        n for _, artifact in result.artifacts for n in artifact.settings.get("notes", ())
    ):
        out.print(f"Note: {note}.", soft_wrap=True)
    folder, artifact = result.artifacts[0]
    place = shlex.quote(str(folder))
    classifies = "task" in artifact.settings
    words = (
        f"evaluate {place} --images FOLDER" if classifies else f'generate {place} --prompt "Once upon a time"'
    )
    out.print(f"Next: kl-lens {words}", soft_wrap=True)


def _lowered(artifact: Artifact) -> str:
    lowered = [t for t in artifact.tensors if t.reason and t.planned not in (FP16, t.realised)]
    return f"{len(lowered)}, e.g. {lowered[0].component}: {lowered[0].reason}" if lowered else ""
