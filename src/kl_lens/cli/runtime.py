"""`kl-lens runtime`: where the library is now, and what it uses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kl_lens.cli.console import console
from kl_lens.pipeline.doctoring import RuntimeResult


def as_json(result: RuntimeResult) -> dict[str, Any]:
    return {"place": None if result.place is None else str(result.place), **asdict(result.health)}


def show(result: RuntimeResult) -> None:
    out = console()
    out.print(f"In place: {result.place}" if result.place else "Removed.", markup=False, soft_wrap=True)
    for line in (result.health.runtime, *result.health.facts, result.health.problem):
        if line:
            out.print(line, markup=False, soft_wrap=True)
