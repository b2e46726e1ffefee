"""`kl-lens merge`: how much came from each folder."""

from __future__ import annotations

from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.study.merge import MergeResult


def as_json(result: MergeResult) -> dict[str, Any]:
    rows = [
        {"source": str(j.source), "taken": j.taken, "known": j.known, "differing": j.differing}
        for j in result.joined
    ]
    return {"run": str(result.folder), "joined": rows, "missing": result.missing, "refused": result.failures}


def show(result: MergeResult) -> None:
    out = console()
    table = new_table(
        "Joined candidate × window pairs", ("from",), ("new", "already there", "already there, different")
    )
    for j in result.joined:
        table.add_row(str(j.source), str(j.taken), str(j.known), str(j.differing))
    if result.joined:
        out.print(table)
    if result.missing:
        out.print(
            f"No shard has measured {result.missing} candidate × window pairs. Measure them without --shard."
        )
    elif result.joined:
        out.print(f"Next: kl-lens plan --run {result.folder}")
