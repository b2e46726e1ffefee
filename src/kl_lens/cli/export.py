"""`kl-lens export`: what was written, and what differs from the plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, table
from kl_lens.reporting.names import runtime_title
from kl_lens.run.records import Artifact
from kl_lens.study.export import ExportResult
from kl_lens.targets import describe_target
from kl_lens.targets.tokenizer import TOKENIZER_FILE
from kl_lens.weights.recipes import FP16


def as_json(result: ExportResult) -> list[dict[str, Any]]:
    return [artifact.to_json() | {"folder": str(folder)} for folder, artifact in result.artifacts]


def show(result: ExportResult) -> None:
    rows = [
        {
            "plan": artifact.plan,
            "for": runtime_title(artifact.target),
            "planned": human_bytes(artifact.planned_bytes),
            "on disk": human_bytes(artifact.realised_bytes),
            "differs from the plan": _lowered(artifact),
            "folder": str(folder),
        }
        for folder, artifact in result.artifacts
    ]
    out = console()
    out.print(table("Exported", rows))
    for _, artifact in result.artifacts:
        out.print(f"{artifact.plan}: {_sizes(artifact)}.", soft_wrap=True)
    notes = [note for _, artifact in result.artifacts for note in artifact.settings.get("notes", ())]
    next_words, why = _next(*result.artifacts[0])
    for note in dict.fromkeys([*notes, *why]):
        out.print(f"Note: {note}.", soft_wrap=True)
    out.print(f"Next: kl-lens {next_words}", soft_wrap=True)


def _sizes(artifact: Artifact) -> str:
    """Where the bytes on disk come from."""
    stored = sum({tensor.runtime_name: tensor.bytes for tensor in artifact.tensors}.values())
    others = sorted({tensor.realised for tensor in artifact.tensors if tensor.realised != tensor.planned})
    differing = (
        f"tensors stored as {' or '.join(others)} instead" if others else "tensors that it does without"
    )
    parts = {
        differing: stored - artifact.planned_bytes,
        describe_target(artifact.target).besides: artifact.realised_bytes - stored,
    }
    told = [f"{'+' if n > 0 else '−'} {human_bytes(abs(n))} for {what}" for what, n in parts.items() if n]
    planned = f"{human_bytes(artifact.planned_bytes)} of weights as planned"
    return " ".join([f"{human_bytes(artifact.realised_bytes)} on disk =", planned, *told])


def _next(folder: Path, artifact: Artifact) -> tuple[str, list[str]]:
    """A command that works with these files, and why it is not the usual one."""
    place, settings = shlex.quote(str(folder)), artifact.settings
    if "task" in settings:
        return f"evaluate {place} --images FOLDER", []
    if settings.get("static_tokens"):
        return f"benchmark {place} --protocol benchmark_app", []
    if settings.get("tokenizer", "none") == "none" and TOKENIZER_FILE not in artifact.files:
        return f"benchmark {place}", ["it holds no tokenizer; generate takes one with --tokenizer"]
    return f'generate {place} --prompt "Once upon a time"', []


def _lowered(artifact: Artifact) -> str:
    lowered = [t for t in artifact.tensors if t.reason and t.planned not in (FP16, t.realised)]
    return f"{len(lowered)}, e.g. {lowered[0].component}: {lowered[0].reason}" if lowered else ""
