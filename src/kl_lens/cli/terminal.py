"""What a command shows: results on standard output; notes, warnings and progress on standard error. And the results of
`generate`, `report`, `publish` and `doctor`, which load no libraries."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kl_lens.base.errors import printable
from kl_lens.base.units import human_bytes
from kl_lens.study.events import Events

if TYPE_CHECKING:  # `kl-lens generate` runs on small devices: libraries load in the functions that need them
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

    from kl_lens.base.progress import Progress
    from kl_lens.study.doctor import DoctorResult
    from kl_lens.study.generate import GenerateResult
    from kl_lens.study.publish import PublishResult

Row = dict[str, str]  # heading → cell
Shown = Iterable["Table | str"]  # a result: tables, and lines


class Bold(str):
    """A line or cell that stands out."""

    style = "bold"


class Red(Bold):
    """What is wrong."""

    style = "bold red"


def console() -> Console:
    """A console that keeps tables whole when the output is a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 220, highlight=False)


def literal(text: str, *, wraps: bool = False) -> Text:
    """Text as it is: names and paths in it are no markup, and a terminal obeys nothing in it."""
    from rich.text import Text

    plain = printable(text)
    return Text(
        wrapped(plain, sys.stdout) if wraps else plain, getattr(text, "style", "")
    )


def wrapped(line: str, stream: TextIO) -> str:
    """At word ends if the stream is a terminal. What is to be copied stays whole: paths, and a command to the end of
    the line."""
    if not stream.isatty():
        return line
    whole = re.sub("kl-lens [a-z].*", lambda found: found[0].replace(" ", "\0"), line)
    lines = textwrap.wrap(
        whole,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * (len(line) - len(line.lstrip())),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def table(title: str, rows: Sequence[Row | None]) -> Table:
    """None is a line between rows. Columns of numbers are aligned right; those without any cell are left out."""
    from rich.table import Table

    shown = Table(title=literal(title), title_justify="left")
    cells = {
        heading: [row.get(heading, "") for row in rows if row]
        for row in rows
        if row
        for heading in row
    }
    cells = {heading: column for heading, column in cells.items() if any(column)}
    for heading, column in cells.items():
        justify: JustifyMethod = "left"
        if all(re.match(r"[-+−]?\d|–|∞|$", cell) for cell in column):
            justify = "right"
        shown.add_column(literal(heading), justify=justify, overflow="fold")
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*(literal(row.get(heading, "")) for heading in cells))
    return shown


def print_json(data: Any) -> None:
    json.dump(_plain(data), sys.stdout, indent=1, allow_nan=False)
    print()


def _plain(data: Any) -> Any:
    """As strict JSON has it: what is not a number (an error that is not defined) becomes null."""
    if hasattr(data, "to_json"):
        return _plain(data.to_json())
    if is_dataclass(data):
        return {field.name: _plain(getattr(data, field.name)) for field in fields(data)}
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, Path) else data


class Terminal(Events):
    """Shows what a verb says. `writes`: also the text that it generates, on standard output."""

    def __init__(self, verb: str, *, writes: bool = True) -> None:
        self.verb = verb
        self._writes = writes

    def note(self, text: str) -> None:
        print(wrapped(printable(text), sys.stderr), file=sys.stderr, flush=True)

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


# -- generate, report, publish, doctor -------------------------------------------------------------------------


def show_generate(result: GenerateResult) -> Shown:
    """The text was printed while it was made; the speeds do not belong to it."""
    print(
        f"[{result.prompt_tokens} prompt tokens at {result.prompt_tokens_per_second:.1f} tokens/s, "
        f"{result.new_tokens} new at {result.tokens_per_second:.1f} tokens/s "
        f"({result.ms_per_token:.2f} ms each), loaded in {result.load_seconds:.2f} s, "
        f"peak memory {result.peak_memory_bytes / 1e6:.0f} MB]",
        file=sys.stderr,
    )
    return ()


def show_report(path: Path) -> Shown:
    yield str(path)


def show_publish(result: PublishResult) -> Shown:
    rows = [
        {"file": name, "size": human_bytes(count)} for name, count in result.files.items()
    ]
    yield table(str(result.folder), rows)
    yield result.url or "Nothing was uploaded (--dry-run)."


def show_doctor(result: DoctorResult) -> Shown:
    rows: list[Row] = []
    for name, health in result.parts.items():
        runtime = health.runtime or "nothing"
        rows.append({"part": name, "found": runtime, "problem": health.problem or "none"})
        rows += ({"found": fact} for fact in health.facts)
    yield table("", rows)
    problems = [health for health in result.parts.values() if health.problem]
    yield from dict.fromkeys(
        f"To fix it: {health.mend}" for health in problems if health.mend
    )
    if not problems:
        yield "No problems found."
