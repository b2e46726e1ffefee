"""Progress of long work: a bar, or plain lines where there is no terminal; and what all of it should take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn
from rich.table import Column

from kl_lens.base.errors import printable
from kl_lens.base.progress import Progress
from kl_lens.reporting.names import runtime_title
from kl_lens.study.events import StageCost

LINE_INTERVAL = 10.0  # seconds between two plain lines
CAUTION = 0.1  # of all that is expected
TITLE_WIDTH = 34  # what follows a title stands in one column
_ALONE = StageCost("", None, 1.0)  # of unknown length
_UNEXPECTED = StageCost("", None, 0.0)
# What a verb does, as people see it.
TITLES = {
    "inspect": "Reading the model",
    "calibrate": "Gathering statistics",
    "measure": "Measuring sensitivity",
    "paper": "Ranking metrics",
    "plan": "Planning",
    "export": "Writing files",
    "evaluate": "Evaluating",
    "autopsy": "Autopsy",
    "generate": "Writing samples of text",
    "benchmark": "Timing",
    "report": "Writing the report",
}


def clock_time(seconds: float) -> str:
    """`0:53`, `1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def stage_title(verb: str, target: str | None) -> str:
    return TITLES[verb] + (f", {runtime_title(target)}" if target else "")


class Forecast:
    """The share of a stage that is done, and how long the rest takes: of one stage, or of all that are expected.

    What has passed shows how many times longer than expected stages take, for each kind: those of the model and those
    of runtimes may be off in different ways.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._to_come: list[StageCost] = []
        self._expected: dict[str, float] = {}  # kind → seconds of all stages
        # Kind, seconds expected, seconds taken.
        self._passed: list[tuple[str, float, float]] = []
        self._scope = ""  # what the time left is of
        self._begin(_ALONE)

    def expect(self, stages: Sequence[StageCost]) -> None:
        """All stages of a run, as they come."""
        self._to_come = [*stages]
        for stage in stages:
            self._expected[stage.kind] = (
                self._expected.get(stage.kind, 0.0) + stage.seconds
            )

    def begin(self, verb: str, target: str | None = None) -> None:
        """A stage begins; those that were expected before it do not come."""
        names = [(stage.verb, stage.target) for stage in self._to_come]
        self._scope = " in all" if self._expected else " in this stage"
        stage = _UNEXPECTED if self._expected else _ALONE
        if (verb, target) in names:
            index = names.index((verb, target))
            stage = self._to_come[index]
            self._to_come = self._to_come[index + 1 :]
        self._begin(stage)

    def end(self, *, counts: bool = True) -> None:
        """The stage is over. `counts`: it was not done already."""
        if counts and self._expected and self._stage.seconds:
            spent = self._clock() - self._begun
            self._passed.append((self._stage.kind, self._stage.seconds, spent))
        self._begin(_UNEXPECTED)

    def _begin(self, stage: StageCost) -> None:
        self._begun = self._clock()
        self._stage = stage
        self.total = self.done = 0.0
        # Times and the work done by then: the beginning, the first piece, the last.
        self._marks = [(self._begun, 0.0)]

    def start(self, total: float, reached: float) -> None:
        """`done`: so far, or by an earlier run."""
        if reached != self.done:
            self._marks = [(self._clock(), reached)]
        self.total = total
        self.done = reached

    def advance(self, work: float) -> None:
        if work:
            self.done += work
            self._marks = [*self._marks[:2], (self._clock(), self.done)]

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def left(self) -> float | None:
        """Seconds; None if nothing is known yet."""
        passed = [*self._passed, *self._lately()]
        if not self._expected and not passed:
            return None

        def at_this_pace(kind: str, seconds: float) -> float:
            # A part of all stages counts as passed on time, so that short ones say little about the rest.
            on_time = CAUTION * self._expected.get(kind, 0.0)
            expected = on_time + sum(
                estimate for name, estimate, _ in passed if name == kind
            )
            actual = on_time + sum(spent for name, _, spent in passed if name == kind)
            return seconds * actual / expected if expected else seconds

        current = self._stage.seconds - self._seconds_of(self.done)
        waited = self._clock() - self._marks[-1][0]
        later = sum(at_this_pace(stage.kind, stage.seconds) for stage in self._to_come)
        return max(0.0, at_this_pace(self._stage.kind, current) - waited) + later

    def _lately(self) -> Iterator[tuple[str, float, float]]:
        """This stage so far. The first of several pieces has one-time work in it (loading, compiling), and says little
        about the pace."""
        if len(self._marks) > 1 and self._stage.seconds:
            (since, before), (last, amount) = self._marks[-2:]
            yield self._stage.kind, self._seconds_of(amount - before), last - since

    def _seconds_of(self, work: float) -> float:
        """The seconds that this part of the stage should take."""
        return self._stage.seconds * work / self.total if self.total else 0.0

    def __str__(self) -> str:
        remaining = (
            "" if self.left is None else f"{clock_time(self.left)} left{self._scope}"
        )
        return f"{100 * self.share:3.0f} %  {remaining}" if self.total else ""


@contextmanager
def shown_progress(
    title: str,
    interval: float = LINE_INTERVAL,
    *,
    details: bool = True,
    forecast: Forecast | None = None,
) -> Iterator[Progress]:
    """A `Progress` that shows itself on standard error. `details`: also what is worked on."""
    forecast = forecast or Forecast()
    if not sys.stderr.isatty():
        yield _lines(title, forecast, interval, details)
        return
    columns = (
        TextColumn(
            "{task.description}",
            table_column=Column(min_width=TITLE_WIDTH),
            markup=False,
        ),
        BarColumn(18),
        TextColumn(
            "{task.fields[forecast]}", table_column=Column(min_width=24, no_wrap=True)
        ),
        *[
            TextColumn(
                "{task.fields[what]}",
                style="dim",
                markup=False,
                table_column=Column(no_wrap=True, ratio=1),
            )
        ]
        * details,
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(title, total=None, forecast=forecast, what="")

        def started(total: float, reached: float) -> None:
            forecast.start(total, reached)
            bar.update(task, total=total, completed=reached, what="")

        def advanced(work: float, words: str) -> None:
            forecast.advance(work)
            bar.update(task, advance=work, what=printable(words))

        def message(text: str) -> None:
            bar.update(task, what=printable(text))

        yield Progress(started, advanced, message=message)


def _lines(title: str, forecast: Forecast, interval: float, details: bool) -> Progress:
    printed = time.monotonic()

    def advanced(work: float, words: str) -> None:
        nonlocal printed
        forecast.advance(work)
        if time.monotonic() - printed >= interval:
            printed = time.monotonic()
            say(f"{forecast}{f'  {words}' if details else ''}")

    def say(text: str) -> None:
        print(printable(f"{title}: {text.strip()}"), file=sys.stderr, flush=True)

    return Progress(
        forecast.start, advanced, message=say if details else lambda text: None
    )
