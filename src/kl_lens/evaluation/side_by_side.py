"""The logits of files: of one, or of several at once, each in its own thread with a share of the processors.

A small model gains little from a second core, and nothing while its file is opened. The number of threads changes speed
only, so the results are the same as one by one. The threads only compute logits.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil

from kl_lens.base.environment import processors
from kl_lens.evaluation.judged import RUNTIME_ERRORS, Judged, JudgedArtifact
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.targets.session import Logits, Session

MOST = 8  # files at once
_MEMORY_PER_FILE_BYTE = 2.5  # memory of a loaded file relative to its size
_FREE_SHARE = 0.5  # of free memory to use


@dataclass(frozen=True)
class Arrived:
    judged: Judged
    window: int
    logits: Logits
    seconds: float
    runtime: dict[str, Any]


def computed(
    judged: Judged, session: Session, text: EvaluationText, windows: Sequence[int]
) -> Iterator[Arrived]:
    """The logits of one subject's windows."""
    for window in windows:
        begin = time.perf_counter()
        logits = session.logits(text.items[window].ids)
        seconds = time.perf_counter() - begin
        judged.check()  # a file that was deleted or changed may still be mapped in part: discard its numbers
        yield Arrived(judged, window, logits, seconds, session.description)


def lanes_for(files: Sequence[JudgedArtifact], logits_bytes: int) -> tuple[int, list[JudgedArtifact]]:
    """How many files to run at once, and which; none if the user set threads or devices, or memory is short.

    Args:
        files: the candidates.
        logits_bytes: size of a window's logits; each lane holds two of them, the caller one more.
    """
    free = [
        f for f in files if f.settings.device == "CPU" and not (f.settings.threads or f.settings.gpu_layers)
    ]
    fewest = {judged: _fewest_threads(judged) for judged in free} if free[1:] else {}
    room = _FREE_SHARE * psutil.virtual_memory().available
    for lanes in range(min(len(fewest), processors(), MOST), 1, -1):
        suitable = [judged for judged, least in fewest.items() if least and least <= processors() // lanes]
        sizes = sorted(sum(path.stat().st_size for path in f.files if path.is_file()) for f in suitable)
        need = sum(sizes[-lanes:]) * _MEMORY_PER_FILE_BYTE + (2 * lanes + 1) * logits_bytes
        if len(suitable) >= lanes and need < room:
            return lanes, suitable
    return 1, []


def _fewest_threads(judged: JudgedArtifact) -> int | None:
    try:
        judged.target.prepare()  # load its libraries here, not in several threads at once
        return judged.target.fewest_threads(judged.path)
    except RUNTIME_ERRORS:
        return None  # reported when it is scored alone


def side_by_side(
    missing: Mapping[JudgedArtifact, Sequence[int]], text: EvaluationText, lanes: int
) -> Iterator[Arrived]:
    """The logits of the missing windows of each file as they arrive; a file that fails is left out from then on.

    Every file gets a new thread: llama.cpp's AMX tiles do not survive OpenVINO's in the same thread
    (docs/troubleshooting.md).
    """
    waiting, threads = list(missing), processors() // lanes
    running: dict[Future[Arrived | None], tuple[ThreadPoolExecutor, Generator[Arrived]]] = {}

    def of_file(judged: JudgedArtifact) -> Generator[Arrived]:
        """Runs in the file's thread, one window at a time."""
        judged.check()
        with closing(judged.open(threads)) as session:
            yield from computed(judged, session, text, missing[judged])

    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                thread, logits = ThreadPoolExecutor(1), of_file(waiting.pop(0))
                running[thread.submit(next, logits, None)] = thread, logits
            done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            try:
                arrived = done.result()
            except RUNTIME_ERRORS:
                arrived = None  # reported when it is scored alone
            thread, logits = running.pop(done)
            if arrived is None:
                thread.shutdown()
            else:
                running[thread.submit(next, logits, None)] = thread, logits
                yield arrived
    finally:
        for thread, logits in running.values():
            thread.submit(logits.close)  # after the window that it computes now
            thread.shutdown()
