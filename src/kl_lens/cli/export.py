"""`kl-lens export`: what was written, and what is not as planned."""

from __future__ import annotations

import shlex
from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.pipeline.exporting import ExportResult, Measured
from kl_lens.records import Artifact
from kl_lens.targets import describe_target
from kl_lens.units import human_bytes


def as_json(result: ExportResult) -> list[dict[str, Any]]:
    return [
        artifact.to_json() | {"folder": str(folder), "measured": result.measured.get(artifact.plan)}
        for folder, artifact in result.artifacts
    ]


def show(result: ExportResult) -> None:
    numbers = ["planned", "on disk"]
    if result.measured:
        numbers += ["KL as planned", "KL as exported", "perplexity"]
    table = new_table("Exported", ("plan", "target"), numbers, ("not as planned", "folder"))
    for folder, artifact in result.artifacts:
        table.add_row(
            artifact.plan,
            artifact.target,
            human_bytes(artifact.planned_bytes),
            human_bytes(artifact.realised_bytes),
            *_measured_cells(result.measured.get(artifact.plan)),
            _lowered(artifact),
            str(folder),
        )
    out = console()
    out.print(table)
    if result.measured:
        first = next(iter(result.measured.values()))
        title = describe_target(result.artifacts[0][1].target).title
        out.print(
            f"KL as exported: the mapped formats with the activations that {title}'s kernels see, on "
            f"{first['measured_on']}; the original's perplexity there is {first['original_perplexity']:.3f}."
        )
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
    lowered = [t for t in artifact.tensors if t.reason and t.planned not in ("fp16", t.realised)]
    return f"{len(lowered)}, e.g. {lowered[0].component}: {lowered[0].reason}" if lowered else ""


def _measured_cells(measured: Measured | None) -> tuple[str, ...]:
    if measured is None:
        return ()
    return (
        f"{measured['planned_kl']:.2e} ± {measured['planned_kl_standard_error']:.0e}",
        f"{measured['exported_kl']:.2e} ± {measured['exported_kl_standard_error']:.0e}",
        f"{measured['exported_perplexity']:.3f}",
    )
