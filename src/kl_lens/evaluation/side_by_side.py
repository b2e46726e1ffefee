"""Several files at once, each in a thread of its own with a share of the processors.

A small model gains little from a second core, and nothing while its file is opened. Threads change speed only, so the
numbers are those that one file after the other would give. The threads compute logits and nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def lanes_for(files: Sequence[JudgedArtifact]) -> tuple[int, list[JudgedArtifact]]:
    """How many to run at once, and which of them; none where somebody said how to run them, or memory is short."""
    free = [
        f for f in files if f.settings.device == "CPU" and not (f.settings.threads or f.settings.gpu_layers)
    ]
    lanes = min(len(free), processors(), MOST)
    sizes = sorted(map(_size, free), reverse=True)
    room = _FREE_SHARE * psutil.virtual_memory().available
    while lanes > 1 and sum(sizes[:lanes]) * _MEMORY_PER_FILE_BYTE > room:
        lanes -= 1
    suitable = [f for f in free if lanes > 1 and _fewest_threads(f) <= processors() // lanes]
    return lanes, suitable if len(suitable) > 1 else []


def _size(judged: JudgedArtifact) -> int:
    return sum(path.stat().st_size for path in judged.files if path.is_file())


def _fewest_threads(judged: JudgedArtifact) -> int:
    try:
        return judged.target.fewest_threads(judged.path)
    except RUNTIME_ERRORS:
        return processors() + 1  # whoever judges it alone will say what is wrong


def side_by_side(
    missing: Mapping[JudgedArtifact, Sequence[int]], text: EvaluationText, lanes: int
) -> Iterator[Arrived]:
    """The logits of these windows of each file, as they come. A file that fails is left out from there on."""
    arrived: queue.Queue[Arrived | None] = queue.Queue(maxsize=lanes)  # each as large as a window's logits
    stopped = threading.Event()

    def hand_over(item: Arrived | None) -> None:
        while not stopped.is_set():
            try:
                arrived.put(item, timeout=_PATIENCE)
                return
            except queue.Full:
                continue

    def judge(judged: JudgedArtifact) -> None:
        try:
            if stopped.is_set():
                return
            judged.check()
            session = judged.open(processors() // lanes)
            try:
                for window in missing[judged]:
                    if stopped.is_set():
                        return
                    begin = time.perf_counter()
                    logits = session.logits(text.items[window].ids)
                    seconds = time.perf_counter() - begin
                    judged.check()  # a file that is gone may still be mapped in part: its numbers do not count
                    hand_over(Arrived(judged, window, logits, seconds, session.description))
            finally:
                session.close()
        except RUNTIME_ERRORS:
            pass  # whoever judges it alone will say what is wrong
        finally:
            hand_over(None)

    with ThreadPoolExecutor(lanes) as pool:
        working = [pool.submit(judge, judged) for judged in missing]
        try:
            left = len(working)
            while left:
                if (item := arrived.get()) is None:
                    left -= 1
                else:
                    yield item
        finally:
            stopped.set()
    for each in working:
        each.result()  # an error of ours is not swallowed
