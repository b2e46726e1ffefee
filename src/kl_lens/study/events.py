"""What a command reports while it works, and what its stages should take."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import printable

if TYPE_CHECKING:  # `generate` runs on small devices and does without torch
    from kl_lens.base.progress import Progress

IN_RUNTIME = "runtime"
IN_MODEL = "model"  # kinds of stages; how far they are off differs


@dataclass(frozen=True)
class StageCost:
    verb: str
    target: str | None
    seconds: float
    disk: int = 0

    @property
    def kind(self) -> str:
        return (
            IN_RUNTIME
            if self.verb in ("export", "evaluate", "generate", "benchmark")
            else IN_MODEL
        )


@dataclass(frozen=True)
class JobEstimate:
    stages: tuple[StageCost, ...]  # as they come
    memory: int
    windows: int
    compiling: float = 0.0  # of the seconds, the first time only
    busy: float = (
        0.0  # share of the processors that others use, which is not in the seconds
    )

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def disk(self) -> int:
        return sum(stage.disk for stage in self.stages)


class Events:
    """Receives notes, warnings and progress; this one ignores them. The command line shows them."""

    def note(self, text: str) -> None:
        """What is happening now."""

    def warn(self, text: str) -> None:
        """Something the user should know."""

    def tell(self, text: str) -> None:
        """What a user of `run` should see at once: a usable file, why a part failed that the rest does not need."""
        self.warn(text)

    def wrote(self, text: str) -> None:
        """A piece of generated text."""

    def ask(self) -> str | None:
        """The next thing that somebody says in a conversation; None: nothing more."""
        return None

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        from kl_lens.base.progress import Progress

        return nullcontext(Progress())

    def keep_in(self, folder: Path) -> None:
        """`run` starts in this folder: logs go there."""

    def expect(self, estimate: JobEstimate) -> None:
        """What the stages of `run` should take."""

    def stage(self, verb: str, target: str | None) -> AbstractContextManager[None]:
        """Wraps a stage of `run`."""
        return nullcontext()

    def skipped(self, verb: str, target: str | None) -> None:
        """A stage of `run` that was already done."""

    def result(self, result: object) -> None:
        """The result of a stage of `run`; None if there is nothing to show."""


@dataclass(frozen=True)
class Several:
    """What a command made for each of several targets."""

    results: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return max(map(exit_code, self.results.values()))


class Bars(Events):
    """For Python: long work shows a bar in a terminal or a notebook, warnings go to the logger `kl_lens`."""

    def warn(self, text: str) -> None:
        logging.getLogger("kl_lens").warning(printable(text))

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress]:
        from rich.console import Console
        from rich.progress import Progress as Bar

        from kl_lens.base.progress import Progress

        console = Console(stderr=True)
        shown = console.is_terminal or console.is_jupyter
        with Bar(console=console, transient=True, disable=not shown) as bar:
            task = bar.add_task(title, total=None)
            yield Progress(
                lambda total, done: bar.update(task, total=total, completed=done),
                lambda work, _: bar.advance(task, work),
            )


def exit_code(result: Any) -> int:
    """Of a command with this result: its own, or 1 if part of the work failed."""
    return int(getattr(result, "exit_code", bool(getattr(result, "failures", None))))


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message that says what was kept."""


@contextmanager
def going_on(folder: Path | None) -> Iterator[None]:
    """Turns Ctrl-C into a message that the run folder keeps what was done."""
    try:
        yield
    except KeyboardInterrupt:
        remainder = (
            f"; {folder} keeps what was done. Run the same command to continue."
            if folder
            else ""
        )
        raise Stopped(f"stopped{remainder}") from None
