"""What the processors do while a GPU measures: read files in their runtimes, quantize for plans to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_lens.base.environment import available_memory, processors
from kl_lens.evaluation.evaluator import Arrived, computed
from kl_lens.evaluation.judged import RUNTIME_ERRORS, JudgedArtifact
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.targets import SessionSettings

SPARED = 2  # processors: for the thread that drives the GPU, and for what it calls
MEMORY_SHARE = 0.1  # of free memory, for the logits of one file


class Ahead:
    """Work in the background, a piece at a time; each has a new thread, as in `side_by_side`. It touches neither the
    model nor the journal: `Evaluator` takes the logits when the file's turn comes, and computes what is missing."""

    def __init__(self) -> None:
        self._last: Future[Any] | None = None
        self._files: dict[Path, tuple[EvaluationText, Future[list[Arrived]]]] = {}
        self._stopped = False

    def start(self, steps: Callable[[], Iterable[Any]]) -> Future[list[Any]]:
        """Does these steps after all earlier work; `stop` leaves out those that have not begun."""
        before, pool = self._last, ThreadPoolExecutor(1)

        def in_turn() -> list[Any]:
            done: list[Any] = []
            if before is not None:
                wait([before])
            for step in () if self._stopped else steps():
                done.append(step)
                if self._stopped:
                    break
            return done

        self._last = future = pool.submit(in_turn)
        pool.shutdown(wait=False)
        return future

    def finish(self) -> None:
        if self._last is not None:
            wait([self._last])

    def stop(self) -> None:
        self._stopped = True
        self._files.clear()

    def read(self, place: Path, settings: SessionSettings, text: EvaluationText, columns: int) -> None:
        """Computes an exported folder's logits on a text. `columns`: of the vocabulary."""
        if sum(len(item.ids) for item in text.items) * columns * 4 > MEMORY_SHARE * available_memory():
            return

        def steps() -> Iterator[Arrived]:
            judged = JudgedArtifact(place, settings, place.name)
            with closing(judged.open(settings.threads or max(1, processors() - SPARED))) as session:
                yield from computed(judged, session, text, range(len(text.items)))

        self._files[place.resolve()] = text, self.start(steps)

    def take(self, judged: JudgedArtifact, text: EvaluationText) -> list[Arrived]:
        """The file's logits on this text, as far as it was read; they are forgotten here."""
        was_read, future = self._files.pop(judged.path.resolve(), (None, None))
        arrived: list[Arrived] = []
        if was_read is not None and future is not None:
            with suppress(*RUNTIME_ERRORS):  # it fails again in its turn, and is reported then
                arrived = [item for item in future.result() if item.judged.identity == judged.identity]
        places = {window.key: index for index, window in enumerate(text.items)}
        found = [(places.get(was_read.items[item.window].key), item) for item in arrived if was_read]
        return [replace(item, window=index) for index, item in found if index is not None]
