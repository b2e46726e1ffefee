"""Standard output for results, standard error for everything else."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from kl_lens.errors import printable
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import Settings, command_of

if TYPE_CHECKING:  # `kl-lens generate` runs on small devices: libraries load in the functions that need them
    from rich.console import Console
    from rich.table import Table

    from kl_lens.sensitivity.sweep import Progress


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole when the output is a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 220, highlight=False)


def new_table(
    title: str, left: Sequence[str] = (), right: Sequence[str] = (), fold: Sequence[str] = ()
) -> Table:
    """A table with columns of words, then of numbers, then of long words."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    for column in fold:
        table.add_column(column, overflow="fold")
    return table


def print_json(data: Any) -> None:
    """Strict JSON: what is not a number (an error that is not defined) becomes null."""
    json.dump(_finite(data), sys.stdout, indent=1, allow_nan=False)
    print()


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


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

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        from kl_lens.cli.progress import sweep_progress

        return sweep_progress(title)

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
            print("done already")
        else:
            self._show(self, result)
