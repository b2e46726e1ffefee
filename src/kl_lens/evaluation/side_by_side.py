"""Several files at once, each in a thread of its own with a share of the processors.

A small model gains little from a second core, and nothing while its file is opened. Threads change speed only, so the
numbers are those that one file after the other would give. The threads compute logits and nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from kl_lens.environment import processors
from kl_lens.evaluation.judged import RUNTIME_ERRORS, JudgedArtifact
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.targets.session import Logits

MOST = 4  # files at once
_MEMORY_PER_FILE_BYTE, _FREE_SHARE = (
    2.5,
    0.5,
)  # a loaded file against itself; of free memory that they may fill
_PATIENCE = 0.1  # seconds between two looks at whether anybody still wants the result


@dataclass(frozen=True)
class Arrived:
    judged: JudgedArtifact
    window: int
    logits: Logits
    seconds: float
    runtime: dict[str, Any]


def lanes_for(files: Sequence[JudgedArtifact], logits_bytes: int) -> tuple[int, list[JudgedArtifact]]:
    """How many to run at once, and which of them; none where somebody said how to run them, or memory is short.

    Args:
        files: those that are wanted.
        logits_bytes: what a window's logits take; every lane has two of them, and whoever asked one more.
    """
    free = [
        f for f in files if f.settings.device == "CPU" and not (f.settings.threads or f.settings.gpu_layers)
    ]
    fewest = {judged: _fewest_threads(judged) for judged in free} if len(free) > 1 else {}
    room = _FREE_SHARE * psutil.virtual_memory().available
    for lanes in range(min(len(fewest), processors(), MOST), 1, -1):
        suitable = [judged for judged, least in fewest.items() if least and least <= processors() // lanes]
        largest = sorted(map(_size, suitable), reverse=True)[:lanes]
        need = sum(largest) * _MEMORY_PER_FILE_BYTE + (2 * lanes + 1) * logits_bytes
        if len(suitable) >= lanes and need < room:
            return lanes, suitable
    return 1, []


def _size(judged: JudgedArtifact) -> int:
    return sum(path.stat().st_size for path in judged.files if path.is_file())


def _fewest_threads(judged: JudgedArtifact) -> int | None:
    try:
        judged.target.prepare()  # its libraries are loaded here, not by several threads at once
        return judged.target.fewest_threads(judged.path)
    except RUNTIME_ERRORS:
        return None  # whoever judges it alone will say what is wrong


class SideBySide:
    """The logits of some windows of each file, as they come.

    A file that fails is left out from there on; so is one that is dropped. Every file has a thread that has run nothing
    else: llama.cpp's tiles do not survive OpenVINO's in the same one (docs/troubleshooting.md).
    """

    def __init__(
        self, missing: Mapping[JudgedArtifact, Sequence[int]], text: EvaluationText, lanes: int
    ) -> None:
        self._missing, self._text, self._lanes = missing, text, lanes
        self._arrived: queue.Queue[Arrived | JudgedArtifact | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._dropped: set[JudgedArtifact] = set()

    def drop(self, judged: JudgedArtifact) -> None:
        """Nothing more of this one is wanted."""
        self._dropped.add(judged)

    def __iter__(self) -> Iterator[Arrived]:
        waiting, running = list(self._missing), dict[JudgedArtifact, threading.Thread]()
        try:
            while waiting or running:
                while waiting and len(running) < self._lanes:
                    judged = waiting.pop(0)
                    running[judged] = threading.Thread(target=self._run, args=(judged,), daemon=True)
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
            pass  # whoever judges it alone will say what is wrong
        except BaseException as error:
            self._hand_over(error)
        finally:
            self._hand_over(judged)

    def _compute(self, judged: JudgedArtifact) -> None:
        judged.check()
        session = judged.open(processors() // self._lanes)
        try:
            for window in self._missing[judged]:
                if self._stopped.is_set() or judged in self._dropped:
                    return
                begin = time.perf_counter()
                logits = session.logits(self._text.items[window].ids)
                seconds = time.perf_counter() - begin
                judged.check()  # a file that is gone may still be mapped in part: its numbers do not count
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
