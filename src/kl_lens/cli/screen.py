"""`kl-lens run` on the screen: one line for each stage. What the stages say and show is in the run's log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.cli.terminal import Terminal
from kl_lens.errors import printable
from kl_lens.pipeline.settings import Settings

if TYPE_CHECKING:
    from kl_lens.sensitivity.sweep import Progress

LINE_INTERVAL = 60.0  # seconds between two lines of progress where there is no terminal
WARNINGS = 2  # of one stage that are shown; the log has all
# What each stage is for.
PURPOSES = {
    "inspect": "what the model is made of",
    "plan": "which recipe each component gets",
    "export": "plans become files",
    "measure": "what each component loses in each recipe",
    "rank": "which metric predicts real damage",
    "evaluate": "what the files lose on text that decided nothing",
    "samples of text": "what original and recommendation write",
    "benchmark": "how fast the files are",
    "report": "all of it on one page",
}


class Screen(Terminal):
    """Stages with their purpose and time on standard error; everything else goes to `RUN/log/`."""

    def __init__(self, verb: str, show: Callable[[Terminal, Any], None]) -> None:
        super().__init__(verb, show)
        self._log: Path | None = None
        self._early = ""  # said before there was a folder
        self._stage, self._since, self._warnings, self._done_already = "", 0.0, 0, False

    def keep_in(self, folder: Path) -> None:
        self._log = folder / "log" / time.strftime("run-%Y%m%d-%H%M%S.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._write(self._early)
        self._say(f"Everything that the stages say: {self._log}")

    def note(self, text: str) -> None:
        self._write(printable(text, kept="\n") + "\n")

    def warn(self, text: str) -> None:
        self.note(f"kl-lens {self.verb}: {text}")
        self._warnings += 1
        if self._warnings <= WARNINGS:
            self._say(printable(f"kl-lens {self.verb}: {text}"))

    def fail(self, text: str) -> None:
        self._warnings = min(self._warnings, WARNINGS - 1)  # never one of those that only the log has
        self.warn(text)

    def heading(self, text: str) -> None:
        self.note(f"\n== {text}")
        if text in PURPOSES:  # a stage that is no verb
            self._say(f"{text:18}        {PURPOSES[text]}")

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        from kl_lens.cli.progress import sweep_progress

        what = PURPOSES.get(self.verb)
        same = not self._stage or title[:5] == self._stage[:5]  # measuring, of measure
        name = (self._stage or title) if same else f"{self._stage}, {title}"
        return sweep_progress(f"{name} ({what})" if what else name, LINE_INTERVAL)

    @contextmanager
    def stage(self, settings: Settings) -> Iterator[None]:
        values = (getattr(settings, name, None) for name in ("target", "as_deployed"))
        whose = next((f" {value}" for value in values if value), "")
        self._stage, self._since, self._warnings = f"{settings.verb}{whose}", time.monotonic(), 0
        self._done_already = False
        with super().stage(settings):
            yield
        spent = "done" if self._done_already else f"{time.monotonic() - self._since:.0f} s"
        self._say(f"{self._stage:18} {spent:>6} {PURPOSES.get(settings.verb, '')}")
        if self._warnings > WARNINGS:
            self._say(f"{'':18}        {self._warnings - WARNINGS} more remarks in the log")
        self._stage, self._warnings = "", 0

    def result(self, result: object) -> None:
        self._done_already = result is None
        shown = StringIO()
        with redirect_stdout(shown):
            super().result(result)
        self._write(shown.getvalue())

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._log is None:
            self._early += text
            return
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text)
