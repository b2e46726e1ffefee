"""What a verb says while it works, shown in a terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import printable
from kl_lens.study.events import Events
from kl_lens.study.settings import Settings, command_of

if TYPE_CHECKING:
    from kl_lens.measuring.sweep import Progress
    from kl_lens.study.costs import JobEstimate


class Terminal(Events):
    """Shows what a verb says: notes, warnings and progress on standard error, generated text on standard output."""

    def __init__(self, verb: str, show: Callable[[Terminal, Any], None], *, writes: bool = True) -> None:
        self.verb = verb
        self._show, self._writes = show, writes

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

    def expect(self, estimate: JobEstimate) -> None:
        from kl_lens.cli.estimates import in_all

        self.heading(in_all(estimate))

    def heading(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    @contextmanager
    def stage(self, settings: Settings) -> Iterator[None]:
        self.heading(f"kl-lens {shlex.join(command_of(settings))}")
        outer, self.verb = self.verb, settings.verb
        try:
            yield
        finally:
            self.verb = outer

    def result(self, result: object) -> None:
        if result is None:
            print("already done")
        else:
            self._show(self, result)
