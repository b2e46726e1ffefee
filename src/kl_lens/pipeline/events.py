"""What a verb says while it works: nothing, unless whoever calls it listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `generate` runs on small devices and does without torch
    from kl_lens.pipeline.settings import Settings
    from kl_lens.sensitivity.sweep import Progress


class Events:
    """Listens to a verb; this one to nothing. The command line shows them."""

    def note(self, text: str) -> None:
        """What goes on, for people."""

    def warn(self, text: str) -> None:
        """What a user should know even when nobody reads the results."""

    def fail(self, text: str) -> None:
        """Why something that others do not need ended badly."""
        self.warn(text)

    def wrote(self, text: str) -> None:
        """A piece of generated text."""

    def ask(self) -> str | None:
        """The next thing that somebody says in a conversation; None: nothing more."""
        return None

    def progress(self, title: str) -> AbstractContextManager[Progress]:
        from kl_lens.sensitivity.sweep import Progress

        return nullcontext(Progress())

    def heading(self, text: str) -> None:
        """What `run` does next."""

    def keep_in(self, folder: Path) -> None:
        """The folder of a `run` that begins, for whoever keeps a log."""

    def stage(self, settings: Settings) -> AbstractContextManager[None]:
        """Around a stage of `run`."""
        return nullcontext()

    def result(self, result: object) -> None:
        """Of a stage of `run`; None where it was done already."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what became of the work."""


@contextmanager
def going_on(folder: Path | None) -> Iterator[None]:
    """Within, Ctrl-C says that the run folder keeps what was done."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; {folder} keeps what was done. The same command goes on from there." if folder else ""
        raise Stopped(f"stopped{kept}") from None
