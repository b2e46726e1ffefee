"""What a verb says while it works, shown in a terminal."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kl_lens.base.errors import printable
from kl_lens.study.events import Events

if TYPE_CHECKING:
    from kl_lens.measuring.sweep import Progress


class Terminal(Events):
    """Shows what a verb says: notes, warnings and progress on standard error, generated text on standard output."""

    def __init__(self, verb: str, *, writes: bool = True) -> None:
        self.verb, self._writes = verb, writes

    def note(self, text: str) -> None:
        print(printable(text, kept="\n"), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.note(f"kl-lens {self.verb}: {text}")

    def wrote(self, text: str) -> None:
        if self._writes:
            print(printable(text, kept="\n\t"), end="", flush=True)

    def ask(self) -> str | None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        from kl_lens.cli.progress import TITLES, shown_progress

        name = TITLES.get(self.verb, title)
        return shown_progress(name if title[:5] == self.verb[:5] else f"{name}, {title}")
