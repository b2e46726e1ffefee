"""What the processors do while a GPU measures: read files in their runtimes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from kl_lens.base.system import available_memory, processors
from kl_lens.judging.evaluator import Arrived, computed
from kl_lens.judging.judged import RUNTIME_ERRORS, JudgedArtifact
from kl_lens.judging.texts import EvaluationText
from kl_lens.targets import SessionSettings

SPARED = 2  # processors: for the thread that drives the GPU, and for what it calls
MEMORY_SHARE = 0.1  # of free memory, for the logits of one file


class Ahead:
    """Reads files in the background, some `at_once`. It touches neither the model nor the journal: `Evaluator` takes
    the logits when a file's turn comes, and computes what is missing."""

    def __init__(self, at_once: int) -> None:
        self._threads = ThreadPoolExecutor(at_once)
        self._stopped = False
        self._processors = max(1, (processors() - SPARED) // at_once)  # for each
        self._files: dict[Path, tuple[EvaluationText, Future[list[Arrived]]]] = {}

    def stop(self) -> None:
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(
        self, place: Path, settings: SessionSettings, text: EvaluationText, columns: int
    ) -> None:
        """Computes an exported folder's logits on a text. `columns`: of the vocabulary."""
        size = sum(len(item.ids) for item in text.items) * columns * 4
        if place.resolve() in self._files or size > MEMORY_SHARE * available_memory():
            return

        def logits() -> list[Arrived]:
            judged = JudgedArtifact(place, settings, place.name)
            with closing(judged.open(settings.threads or self._processors)) as session:
                windows = computed(judged, session, text, range(len(text.items)))
                return [*takewhile(lambda _: not self._stopped, windows)]

        self._files[place.resolve()] = text, self._threads.submit(logits)

    def take(self, judged: JudgedArtifact, text: EvaluationText) -> list[Arrived]:
        """The file's logits on this text, as far as it was read; they are forgotten here."""
        was_read, future = self._files.pop(judged.path.resolve(), (text, None))
        places = {window.key: index for index, window in enumerate(text.items)}
        arrived: list[Arrived] = []
        with suppress(
            *RUNTIME_ERRORS
        ):  # it fails again in its turn, and is reported then
            arrived = [] if future is None else future.result()
        return [
            replace(item, window=places[key])
            for item in arrived
            if item.judged.identity == judged.identity
            and (key := was_read.items[item.window].key) in places
        ]
