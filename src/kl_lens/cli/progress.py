"""Progress of long work: a bar that ends in a line with the time it took, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress as Bar, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kl_lens.cli.console import console
from kl_lens.sensitivity.sweep import Progress

LINE_INTERVAL = 10.0  # seconds between two plain lines
RECENT = 0.5  # of the time so far: what a forecast goes by
TOGETHER = 0.05  # seconds: several candidates that were measured at once arrive one by one
TITLE_WIDTH = 40  # what follows a title stands in one column
# What a verb does, as people see it.
TITLES = {
    "inspect": "Reading the model",
    "calibrate": "Gathering statistics",
    "measure": "Measuring sensitivity",
    "rank": "Ranking metrics",
    "plan": "Planning",
    "export": "Writing files",
    "evaluate": "Evaluating",
    "autopsy": "Autopsy",
    "generate": "Writing samples of text",
    "benchmark": "Timing",
    "report": "Writing the report",
    "runtime": "Building llama.cpp",
}


def clock_time(seconds: float) -> str:
    """`0:53`, `1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Forecast:
    """The share of the work that is done, and how long the rest takes at the pace of the last while.

    The first piece has one-time work in it (loading, compiling) and is no sample of the pace. Neither is what is long
    past: machines get busier and calmer.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self.start(0.0, 0.0)

    def start(self, total: float, done: float) -> None:
        """`done`: by an earlier run."""
        self.total, self.done = total, done
        self._seen = [(self._clock(), done)]  # when how much was done; the first: the beginning

    def advance(self, work: float) -> None:
        self.done += work
        now = self._clock()
        if len(self._seen) > 2 and now - self._seen[-1][0] < TOGETHER:  # the rest of what was done together
            self._seen.pop()
        self._seen.append((now, self.done))

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def left(self) -> float | None:
        """Seconds; None until something has been done."""
        if len(self._seen) < 2:
            return None
        begin, (last, done) = self._seen[0][0], self._seen[-1]
        recent = [s for s in self._seen[1:-1] if s[0] >= last - RECENT * (last - begin)]
        since, before = next(iter(recent or self._seen[-2:]))
        left = (last - since) * (self.total - done) / max(done - before, 1e-9 * self.total)
        return max(0.0, left - (self._clock() - last))

    def __str__(self) -> str:
        left = "" if self.left is None else f"{clock_time(self.left)} left"
        return f"{100 * self.share:3.0f} %  {left}" if self.total else ""


class _Told(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["forecast"]))


@contextmanager
def shown_progress(
    title: str, interval: float = LINE_INTERVAL, *, details: bool = True
) -> Iterator[Progress]:
    """A `Progress` that shows itself on standard error. `details`: also what is worked on."""
    forecast = Forecast()
    if not sys.stderr.isatty():
        yield _lines(title, forecast, interval, details)
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", table_column=Column(min_width=TITLE_WIDTH)),
        BarColumn(20),
        _Told(table_column=Column(min_width=18, no_wrap=True)),
    ]
    if details:
        columns.append(
            TextColumn("{task.fields[what]}", style="dim", table_column=Column(no_wrap=True, ratio=1))
        )
    with Bar(*columns, console=console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, forecast=forecast, what="")

        def started(total: float, done: float) -> None:
            forecast.start(total, done)
            bar.update(task, total=total, completed=done, what="")

        def advanced(work: float, what: str) -> None:
            forecast.advance(work)
            bar.update(task, advance=work, what=what)

        yield Progress(started, advanced, message=lambda text: bar.update(task, what=text))


def _lines(title: str, forecast: Forecast, interval: float, details: bool) -> Progress:
    printed = time.monotonic()

    def advanced(work: float, what: str) -> None:
        nonlocal printed
        forecast.advance(work)
        if time.monotonic() - printed >= interval:
            printed = time.monotonic()
            say(f"{forecast}{f'  {what}' if details else ''}")

    def say(text: str) -> None:
        print(f"{title}: {text.strip()}", file=sys.stderr, flush=True)

    return Progress(forecast.start, advanced, message=say if details else lambda text: None)
