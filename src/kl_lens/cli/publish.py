"""`kl-lens publish`: what was written, and where it is now."""

from __future__ import annotations

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, table
from kl_lens.study.publish import PublishResult


def show(result: PublishResult) -> None:
    out = console()
    rows = [{"file": name, "size": human_bytes(count)} for name, count in result.files.items()]
    out.print(table(str(result.folder), rows))
    out.print(result.url or "Nothing was uploaded (--dry-run).", soft_wrap=True)
