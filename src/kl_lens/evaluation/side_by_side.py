"""Runs several files at once, each in its own thread with a share of the processors.

A small model gains little from a second core, and nothing while its file is opened. The number of threads changes speed
only, so the results are the same as one by one; once files are done, the others may take their share. The threads only
compute logits.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from kl_lens.base.environment import processors
from kl_lens.evaluation.judged import RUNTIME_ERRORS, JudgedArtifact
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.targets.session import ElasticSession, Logits

MOST = 8  # files at once
_MEMORY_PER_FILE_BYTE = 2.5  # memory of a loaded file relative to its size
_FREE_SHARE = 0.5  # of free memory to use
_PATIENCE = 0.1  # seconds between checks for a stop


@dataclass(frozen=True)
class Arrived:
    judged: JudgedArtifact
    window: int
    logits: Logits
    seconds: float
    runtime: dict[str, Any]


def lanes_for(files: Sequence[JudgedArtifact], logits_bytes: int) -> tuple[int, list[JudgedArtifact]]:
    """How many files to run at once, and which; none if the user set threads or devices, or memory is short.

    Args:
        files: the candidates.
        logits_bytes: size of a window's logits; each lane holds two of them, the caller one more.
    """
    free = [
        f for f in files if f.settings.device == "CPU" and not (f.settings.threads or f.settings.gpu_layers)
    ]
    fewest = {judged: _fewest_threads(judged) for judged in free} if len(free) > 1 else {}
    room = _FREE_SHARE * psutil.virtual_memory().available

    def duration(lanes: int) -> float:
        """Rounds of files × time of a round. Twice the threads do not halve a file's time."""
        return math.ceil(len(fewest) / lanes) / (processors() // lanes) ** 0.75

    for lanes in sorted(range(min(len(fewest), processors(), MOST), 1, -1), key=duration):
        suitable = [judged for judged, least in fewest.items() if least and least <= processors() // lanes]
        largest = sorted(map(_size, suitable), reverse=True)[:lanes]
        need = sum(largest) * _MEMORY_PER_FILE_BYTE + (2 * lanes + 1) * logits_bytes
        if len(suitable) >= lanes and need < room:
            return lanes, suitable
    return 1, []


def threads_of(running: Collection[JudgedArtifact]) -> dict[JudgedArtifact, int]:
    """All processors, shared out; the first files get what is left over."""
    each, left = divmod(processors(), len(running))
    return {judged: each + (index < left) for index, judged in enumerate(running)}


def _size(judged: JudgedArtifact) -> int:
    return sum(path.stat().st_size for path in judged.files if path.is_file())


def _fewest_threads(judged: JudgedArtifact) -> int | None:
    try:
        judged.target.prepare()  # load its libraries here, not in several threads at once
        return judged.target.fewest_threads(judged.path)
    except RUNTIME_ERRORS:
        return None  # reported when it is scored alone


class SideBySide:
    """Yields the logits of the missing windows of each file as they arrive.

    A file that fails or is dropped is left out from then on. Every file gets a new thread: llama.cpp's AMX tiles do not
    survive OpenVINO's in the same thread (docs/troubleshooting.md).
    """

    def __init__(
        self, missing: Mapping[JudgedArtifact, Sequence[int]], text: EvaluationText, lanes: int
    ) -> None:
        self._missing, self._text, self._lanes = missing, text, lanes
        self._arrived: queue.Queue[Arrived | JudgedArtifact | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._dropped: set[JudgedArtifact] = set()
        self._threads: dict[JudgedArtifact, int] = {}  # of those that run

    def drop(self, judged: JudgedArtifact) -> None:
        """Stops this file."""
        self._dropped.add(judged)

    def __iter__(self) -> Iterator[Arrived]:
        waiting, running = list(self._missing), dict[JudgedArtifact, threading.Thread]()
        try:
            while waiting or running:
                begun = waiting[: self._lanes - len(running)]
                waiting = waiting[len(begun) :]
                for judged in begun:
                    running[judged] = threading.Thread(target=self._run, args=(judged,), daemon=True)
                self._threads = threads_of(running)
                for judged in begun:
                    running[judged].start()
                item = self._arrived.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, JudgedArtifact):
                    running.pop(item).join()
                elif item.judged not in self._dropped:
                    yield item
        finally:
            self._stopped.set()
            for thread in running.values():
                if thread.ident is not None:
                    thread.join()

    def _run(self, judged: JudgedArtifact) -> None:
        try:
            self._compute(judged)
        except RUNTIME_ERRORS:
            pass  # reported when it is scored alone
        except BaseException as error:
            self._hand_over(error)
        finally:
            self._hand_over(judged)

    def _compute(self, judged: JudgedArtifact) -> None:
        judged.check()
        session = judged.open(self._threads[judged])
        try:
            for window in self._missing[judged]:
                if self._stopped.is_set() or judged in self._dropped:
                    return
                if isinstance(session, ElasticSession):
                    session.use_threads(self._threads[judged])
                begin = time.perf_counter()
                logits = session.logits(self._text.items[window].ids)
                seconds = time.perf_counter() - begin
                judged.check()  # a deleted file may still be mapped in part: discard its numbers
                self._hand_over(Arrived(judged, window, logits, seconds, session.description))
        finally:
            session.close()

    def _hand_over(self, item: Arrived | JudgedArtifact | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._arrived.put(item, timeout=_PATIENCE)
                return
            except queue.Full:
                continue
