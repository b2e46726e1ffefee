"""`kl-lens publish`: what was written, and where it is now."""

from __future__ import annotations

from typing import Any

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, new_table
from kl_lens.study.publish import PublishResult


def as_json(result: PublishResult) -> dict[str, Any]:
    return {"folder": str(result.folder), "files": result.files, "url": result.url}


def show(result: PublishResult) -> None:
    out = console()
    table = new_table(str(result.folder), ("file",), ("size",))
    for name, count in result.files.items():
        table.add_row(name, human_bytes(count))
    out.print(table)
    out.print(result.url or "Nothing was uploaded (--dry-run).", soft_wrap=True)
