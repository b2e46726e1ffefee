"""What a run does beside its stages: it tokenizes the text; where a GPU leaves the processors time, it reads files in
their runtimes, and another process quantizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

from kl_lens.base.aside import Aside, aside
from kl_lens.base.system import processors
from kl_lens.judging.ahead import SPARED, Ahead
from kl_lens.model import LoadedModel
from kl_lens.study import settings as of
from kl_lens.study.session import Session
from kl_lens.study.settings import Opening
from kl_lens.weights.recipes import Recipe

LARGE = 5e7  # weights per processor: 8 windows of 130 million on two ARM cores took over four minutes
AT_ONCE = 3  # files of a small model read beside a GPU


def is_large(model: LoadedModel) -> bool:
    weights = sum(component.parameters for component in model.anatomy.components)
    return weights > LARGE * processors()


def leaves_time(model: LoadedModel) -> bool:
    """Whether a GPU measures. Without one, work beside measuring would only take turns with it; a model on disk has no
    memory to spare."""
    return model.device.type != "cpu" and model.residency is None


class Background:
    def __init__(self, model: LoadedModel, opening: Opening, folder: Path) -> None:
        self.files: Ahead | None = None  # that are read
        self._apart: Aside | None = None  # quantizes
        self._quantized: dict[str, Future[None]] = {}  # by target
        self.tokenizing: Thread | None = None
        if not leaves_time(model):
            return
        # Of a small model several files are read at once, because one does not keep all processors busy, and its stock
        # recipes are quantized before another process could start.
        large = is_large(model)
        self.files = Ahead(1 if large else AT_ONCE, opening.memory)
        if large:
            self._apart = aside(
                max(1, processors() - SPARED),
                begin_apart,
                model.source or model.name,
                replace(opening, device="cpu", weights=of.DISK),
                folder,
            )

    def stop(self) -> None:
        if self.files is not None:
            self.files.stop()
        self._end_quantizing()

    def tokenize(self, work: Callable[[], object]) -> None:
        """What fails is reported when the text is used."""

        def attempt() -> None:
            with suppress(Exception):
                work()

        # A daemon does not hold up a command that ends.
        self.tokenizing = Thread(target=attempt, daemon=True)
        self.tokenizing.start()

    def finish_tokenizing(self) -> None:
        if self.tokenizing is not None:
            self.tokenizing.join()

    @property
    def quantizes(self) -> bool:
        return self._apart is not None

    def quantize(self, target: str, parts: Sequence[tuple[str, Recipe]]) -> None:
        if self._apart is not None:
            with suppress(BrokenExecutor):  # it could not open the model, or died
                self._quantized[target] = self._apart.submit(quantize_apart, parts)

    def leave_quantizing(self, target: str) -> None:
        """A plan for the target needs what is missing now, and has all processors."""
        if target in self._quantized and not self._quantized[target].done():
            self._end_quantizing()

    def _end_quantizing(self) -> None:
        if self._apart is not None:
            self._apart.end()
            self._apart = None


_apart: LoadedModel  # in the process that quantizes ahead


def begin_apart(source: str, opening: Opening, folder: Path) -> None:
    global _apart
    session = Session()
    _apart = session.in_run(session.model(source, opening), folder)


def quantize_apart(parts: Sequence[tuple[str, Recipe]]) -> None:
    """For the store on disk, which knows weights by their content. What needs statistics is left out: those of a GPU
    may differ in the last bit."""
    for component, recipe in parts:
        if recipe.quantizer.is_expensive(recipe.grid) and not recipe.quantizer.learns:
            _apart.weights.digest(component, recipe)
