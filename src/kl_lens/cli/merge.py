"""`kl-lens merge`: how much came from each folder."""

from __future__ import annotations

from kl_lens.cli.console import console, table
from kl_lens.study.merge import MergeResult


def show(result: MergeResult) -> None:
    out = console()
    rows = [
        {
            "from": str(each.source),
            "new": str(each.taken),
            "already there": str(each.known),
            "already there, different": str(each.differing),
        }
        for each in result.joined
    ]
    if rows:
        out.print(table("Joined candidate × window pairs", rows))
    if result.missing:
        out.print(
            f"No shard has measured {result.missing} candidate × window pairs. Measure them without --shard."
        )
    elif rows:
        out.print(f"Next: kl-lens plan --run {result.folder}")
