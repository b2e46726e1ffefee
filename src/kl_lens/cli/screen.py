"""`kl-lens run` on the screen: one line for each stage. What the stages say and find is in the run's log."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import printable
from kl_lens.cli.progress import TITLE_WIDTH, Forecast, clock_time, in_all, shown_progress, stage_title
from kl_lens.cli.terminal import Terminal
from kl_lens.study.events import JobEstimate
from kl_lens.study.settings import Settings, command_of

if TYPE_CHECKING:
    from kl_lens.measuring.sweep import Progress

LINE_INTERVAL = 60.0  # seconds between two lines of progress where there is no terminal


class Screen(Terminal):
    """Stages with their time on standard error; everything else goes to `RUN/log/`."""

    def __init__(self, verb: str, show: Callable[[Terminal, Any], None]) -> None:
        super().__init__(verb)
        self._show = show  # prints the result of a stage
        self._log: Path | None = None
        self._early = ""  # said before there was a folder
        self._progress: Progress | None = None  # of the stage
        self._done_already = False
        self._forecast = Forecast()

    def expect(self, estimate: JobEstimate) -> None:
        self._forecast.expect(estimate.stages)
        self.heading(in_all(estimate))

    def keep_in(self, folder: Path) -> None:
        self._log = folder / "log" / time.strftime("run-%Y%m%d-%H%M%S.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._write(self._early)
        self._say(f"Log: {self._log}")

    def note(self, text: str) -> None:
        self._write(printable(text, kept="\n") + "\n")

    def fail(self, text: str) -> None:
        self.warn(text)
        self._say(printable(f"kl-lens {self.verb}: {text}"))

    def heading(self, text: str) -> None:
        self.note(f"\n== {text}")
        self._say(text.capitalize())

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        if self._progress is None:  # before the first stage
            return shown_progress(title.capitalize(), LINE_INTERVAL, details=False)
        return nullcontext(self._progress)

    @contextmanager
    def stage(self, settings: Settings) -> Iterator[None]:
        self.note(f"\n== kl-lens {shlex.join(command_of(settings))}")
        outer, self.verb = self.verb, settings.verb
        target = next((t for n in ("target", "as_deployed") if (t := getattr(settings, n, None))), None)
        begin, self._done_already = time.monotonic(), False
        self._forecast.begin(settings.verb, target)
        title = stage_title(settings.verb, target)
        try:
            shown = shown_progress(title, LINE_INTERVAL, details=False, forecast=self._forecast)
            with shown as self._progress:
                yield
        finally:
            self._progress, self.verb = None, outer
        spent = "already done" if self._done_already else clock_time(time.monotonic() - begin)
        self._forecast.end(counts=not self._done_already)
        left = f"  about {clock_time(left)} left" if (left := self._forecast.left) else ""
        self._say(f"{title:{TITLE_WIDTH}} {spent}{left}")

    def result(self, result: object) -> None:
        self._done_already = result is None
        with redirect_stdout(StringIO()) as shown:
            if result is not None:
                self._show(self, result)
        self._write(shown.getvalue())

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._log is None:
            self._early += text
            return
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text)
