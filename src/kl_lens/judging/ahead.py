"""The logits of files, by threads: of several files at once, or while a GPU measures.

Every file gets a thread of its own with a share of the processors: a small model gains little from a second core, and
nothing while its file is opened. llama.cpp's AMX tiles do not survive OpenVINO's in the same thread
(docs/troubleshooting.md). The number of threads changes speed only. The threads only compute logits; they touch neither
the original nor the journal.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from kl_lens.base.system import available_memory, processors
from kl_lens.judging.judged import RUNTIME_ERRORS, Judged, JudgedArtifact
from kl_lens.judging.texts import EvaluationText, Window
from kl_lens.targets import SessionSettings
from kl_lens.targets.session import Logits, Session

MOST = 8  # files at once
SPARED = 2  # processors: for the thread that drives the GPU, and for what it calls
_FLOAT_BYTES = 4
_MEMORY_PER_FILE_BYTE = 2.5  # memory of a loaded file relative to its size
# Of free memory, if the budget is not smaller.
_SHARE_AT_ONCE = 0.5
_SHARE_AHEAD = 0.1  # for the logits of one file


@dataclass(frozen=True)
class Arrived:
    judged: Judged
    window: int
    logits: Logits
    seconds: float
    runtime: dict[str, Any]


def computed(
    judged: Judged, session: Session, windows: Mapping[int, Window]
) -> Iterator[Arrived]:
    """The logits of one subject's windows."""
    for index, window in windows.items():
        begin = perf_counter()
        logits = session.logits(window.ids)
        seconds = perf_counter() - begin
        judged.check()  # a file that was deleted or changed may still be mapped in part: discard its numbers
        yield Arrived(judged, index, logits, seconds, session.description)


# -- several at once -----------------------------------------------------------------------------------------


def lanes_for(
    files: Sequence[JudgedArtifact], logits_bytes: int, budget: int
) -> tuple[int, list[JudgedArtifact]]:
    """How many files to run at once, and which; none if the user set threads or devices, or memory is short.
    `logits_bytes`: of a window; each lane holds two of them, the caller one more."""
    unset = [
        file
        for file in files
        if file.settings.device == "CPU"
        and not (file.settings.threads or file.settings.gpu_layers)
    ]
    fewest: dict[JudgedArtifact, int] = {}
    for judged in unset if unset[1:] else ():
        with suppress(*RUNTIME_ERRORS):  # reported when it is scored alone
            judged.target.prepare()  # load its libraries here, not in several threads at once
            if least := judged.target.fewest_threads(judged.path):
                fewest[judged] = least
    room = min(_SHARE_AT_ONCE * available_memory(), budget)
    for lanes in range(min(len(fewest), processors(), MOST), 1, -1):
        threads = processors() // lanes
        suitable = [judged for judged, least in fewest.items() if least <= threads]
        largest = sorted(judged.bytes for judged in suitable)[-lanes:]
        need = sum(largest) * _MEMORY_PER_FILE_BYTE + (2 * lanes + 1) * logits_bytes
        if len(suitable) >= lanes and need < room:
            return lanes, suitable
    return 1, []


def side_by_side(
    missing: Mapping[JudgedArtifact, Mapping[int, Window]], lanes: int
) -> Iterator[Arrived]:
    """The logits of the missing windows of each file as they arrive; a file that fails is left out from then on."""
    waiting = list(missing)
    threads = processors() // lanes
    running: dict[
        Future[Arrived | None], tuple[ThreadPoolExecutor, Generator[Arrived]]
    ] = {}

    def of_file(judged: JudgedArtifact) -> Generator[Arrived]:
        """Runs in the file's thread, one window at a time."""
        judged.check()
        with closing(judged.open(threads)) as session:
            yield from computed(judged, session, missing[judged])

    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                thread = ThreadPoolExecutor(1)
                logits = of_file(waiting.pop(0))
                running[thread.submit(next, logits, None)] = thread, logits
            future = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            arrived: Arrived | None = None
            with suppress(*RUNTIME_ERRORS):  # reported when it is scored alone
                arrived = future.result()
            thread, logits = running.pop(future)
            if arrived is None:
                thread.shutdown()
            else:
                running[thread.submit(next, logits, None)] = thread, logits
                yield arrived
    finally:
        for thread, logits in running.values():
            thread.submit(logits.close)  # after the window that it computes now
            thread.shutdown()


# -- while a GPU measures ------------------------------------------------------------------------------------


class Ahead:
    """Reads files in the background, some `at_once`: `Evaluator` takes the logits when a file's turn comes, and
    computes what is missing."""

    def __init__(self, at_once: int, budget: int) -> None:
        self._threads = ThreadPoolExecutor(at_once)
        self._stopped = False
        self._processors = max(1, (processors() - SPARED) // at_once)  # of each thread
        self._budget = budget
        self._files: dict[Path, tuple[EvaluationText, Future[list[Arrived]]]] = {}

    def stop(self) -> None:
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def read(
        self, folder: Path, settings: SessionSettings, text: EvaluationText, columns: int
    ) -> None:
        """Computes an exported folder's logits on a text. `columns`: of the vocabulary."""
        size = sum(len(window.ids) for window in text.items) * columns * _FLOAT_BYTES
        room = min(_SHARE_AHEAD * available_memory(), self._budget)
        if folder.resolve() in self._files or size > room:
            return

        def logits() -> list[Arrived]:
            judged = JudgedArtifact(folder, settings, folder.name)
            with closing(judged.open(settings.threads or self._processors)) as session:
                windows = computed(judged, session, dict(enumerate(text.items)))
                return [*takewhile(lambda _: not self._stopped, windows)]

        self._files[folder.resolve()] = text, self._threads.submit(logits)

    def take(self, judged: JudgedArtifact, text: EvaluationText) -> list[Arrived]:
        """The file's logits on the beginning of this text, as far as it was read; they are forgotten here."""
        if (entry := self._files.pop(judged.path.resolve(), None)) is None:
            return []
        read, future = entry
        keys = [window.key for window in text.items]
        with suppress(
            *RUNTIME_ERRORS
        ):  # it fails again in its turn, and is reported then
            return [
                item
                for item in future.result()
                if item.judged.identity == judged.identity
                and keys[item.window : item.window + 1] == [read.items[item.window].key]
            ]
        return []
