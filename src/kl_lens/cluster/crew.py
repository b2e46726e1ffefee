"""Gives pieces of a sweep to workers and collects their results; a free worker gets the largest piece left.

A worker that dies is replaced and its piece done again. A piece that fails on two workers, or kills several, is
reported as failed, and the rest continues. Nothing is stored here: the caller commits results as they arrive.
`WorkerPool` starts the workers, with Ray or on this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
import torch

from kl_lens.cluster.worker import Failed, Job, Order, Ready
from kl_lens.errors import KLLensError
from kl_lens.samples import METRICS_VERSION
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.pieces import Found, Layout, Piece, key_of
from kl_lens.version import __version__

_FAILURES = 2  # a piece that fails on this many workers is given up
_HOPELESS = 3  # stop if this many fail for the same reason before any succeeds
_DEATHS = 5  # a piece is given up after this many deaths, which may have other causes
_LOST_STARTS = 5  # failed starts in a row, beyond one per worker
_PATIENCE = 30.0  # seconds between messages about waiting


class Lost(Exception):
    """A worker died; the message says why."""


class WorkerPool(Protocol):
    """Starts and ends workers. A worker handles one call at a time."""

    @property
    def flag(self) -> str:
        """The command-line flag, for messages."""

    def open(self, order: Order, workers: int | None) -> tuple[Order, int]:
        """Prepares `workers` workers; returns the completed order and their number."""

    def close(self) -> None:
        """Ends all workers."""

    def hire(self, order: Order) -> Any:
        """Requests a worker; it may not have started yet."""

    def call(self, worker: Any, method: str, *arguments: object) -> Any:
        """Calls a method of `Worker`."""

    def wait(self, calls: Sequence[Any], seconds: float) -> Any | None:
        """One of the calls that has an answer, or None after `seconds`."""

    def answer(self, call: Any) -> Any:
        """The answer of a call; raises `Lost` if the worker died."""

    def dismiss(self, worker: Any) -> None:
        """Ends a worker at once."""


@dataclass(eq=False)
class _Member:
    worker: Any
    place: str = "a worker"
    windows: tuple[int, ...] = ()  # it has the teacher of these windows
    layout: Layout | None = None
    piece: Piece | None = None


@dataclass
class HiredCrew:
    """Workers in other processes, here or elsewhere: a `Crew` of `sensitivity.sweep`.

    Example:
        >>> with HiredCrew(ProcessHands(), order, workers=2) as crew:
        ...     Sweep(model, run, crew=crew).measure(candidates, windows)
    """

    pool: WorkerPool
    order: Order
    workers: int | None = None
    say: Callable[[str], None] = lambda text: None
    failures: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._members: list[_Member] = []
        self._waiting: dict[Any, _Member] = {}  # open call → member
        self._job: Any = None
        self._layout: Layout | None = None
        self._lost_starts = self._jobs = 0
        self._refusals: list[str] = []
        self.order, self.workers = self.pool.open(self.order, self.workers)
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    # -- starting --------------------------------------------------------------------------------------

    def _ask_for_one(self) -> None:
        member = _Member(self.pool.hire(self.order))
        self._members.append(member)
        self._call(member, "hello")

    def _call(self, member: _Member, method: str, *arguments: object) -> None:
        self._waiting[self.pool.call(member.worker, method, *arguments)] = member

    def begin(
        self, candidates: Sequence[Candidate], ids: torch.Tensor, precision: str | None, known: str | None
    ) -> Layout:
        """Starts a sweep; the first worker that has opened the model decides the layout."""
        self.failures, self._layout = {}, None
        self._jobs += 1
        learnt = self._statistics(candidates)
        keys = tuple(key_of(candidate) for candidate in candidates)
        self._candidates = candidates
        self._job = Job(self._jobs, keys, ids.cpu().numpy().astype(np.int64), precision, known, learnt)
        for member in self._members:
            member.layout, member.windows = None, ()
            if member not in self._waiting.values():
                self._call(member, "begin", self._job)
        while len(self._members) < (self.workers or 1):
            self._ask_for_one()
        while self._layout is None:
            self._hear(self.say)
        return self._layout

    def cut(self, layout: Layout, costs: Sequence[float]) -> list[Piece]:
        return layout.spread(costs, self.workers or 1)

    # -- working ---------------------------------------------------------------------------------------

    def do(self, pieces: Iterable[Piece], message: Callable[[str], None]) -> Iterator[Found]:
        """Yields results as they arrive, until no piece is left that can be done."""
        self._queue = sorted(pieces, key=lambda piece: -piece.work)
        self._again: list[Piece] = []
        self._failed: Counter[Piece] = Counter()
        self._died: Counter[Piece] = Counter()
        self._reasons: Counter[str] = Counter()
        done = False
        self._give_out()
        while self._queue or self._again or any(member.piece for member in self._members):
            found = self._hear(message)
            done = done or bool(found)
            if not done and max(self._reasons.values(), default=0) >= _HOPELESS:
                raise KLLensError(self._reasons.most_common(1)[0][0])
            self._give_out()  # before results are committed, so that workers do not wait for that
            yield from found

    def _give_out(self) -> None:
        for member in self._members:
            if member.layout is not None and member.piece is None:
                self._give(member)

    def _give(self, member: _Member) -> None:
        """Gives the largest piece on the worker's current windows; else on those with the most work per worker."""
        pieces = self._queue or self._again
        if not pieces:
            return
        own = [piece for piece in pieces if piece.windows == member.windows]
        if not own:
            left = Counter[tuple[int, ...]]()
            for piece in pieces:
                left[piece.windows] += piece.work  # type: ignore[assignment]
            there = Counter(m.windows for m in self._members if m.piece is not None)
            windows = max(left, key=lambda w: left[w] / (1 + there[w]))
            own = [piece for piece in pieces if piece.windows == windows]
        piece = max(own, key=lambda p: p.work)
        pieces.remove(piece)
        member.piece, member.windows = piece, piece.windows
        self._call(member, "do", self._jobs, piece)

    def _hear(self, message: Callable[[str], None]) -> Sequence[Found]:
        """Waits for one answer; returns its results if it was for a piece."""
        if not self._waiting:
            raise KLLensError(
                "; ".join(dict.fromkeys(self._refusals)) or f"{self.pool.flag}: no worker is left"
            )
        call = self.pool.wait(list(self._waiting), _PATIENCE)
        if call is None:
            at_work = sum(member.piece is not None for member in self._members)
            message(f"waiting: {at_work} of {self.workers} workers are busy")
            return []
        member = self._waiting.pop(call)
        try:
            answer = self.pool.answer(call)
        except Lost as error:
            self._lose(member, str(error))
            return []
        if member.piece is None:
            self._welcome(member, answer)
            return []
        piece, member.piece = member.piece, None
        if isinstance(answer, Failed):
            self._count_failure(member, piece, answer.reason)
            return []
        found: Sequence[Found] = answer
        return found

    def _welcome(self, member: _Member, answer: Any) -> None:
        """Handles a worker's first answers: its version, and that it is ready."""
        if isinstance(answer, tuple):
            version, meaning, host, process = answer
            member.place = f"worker {process} on {host}"
            if (version, meaning) != (__version__, METRICS_VERSION):
                answer = Failed(
                    f"it has kl-lens {version} (metrics {meaning}), this machine has {__version__} (metrics "
                    f"{METRICS_VERSION}); install the same version everywhere"
                )
            else:
                self._call(member, "begin", self._job)
                return
        if isinstance(answer, Ready):
            self._lost_starts = 0
            if answer.job != self._jobs:  # it was ready for an earlier sweep
                self._call(member, "begin", self._job)
                return
            if self._layout is None:
                self._layout = answer.layout
                # Later workers use the same precision.
                self._job = replace(self._job, precision=answer.layout.precision)
            if answer.layout == self._layout:
                member.layout = answer.layout
                return
            answer = Failed(
                "it would compute differently from the others: another kind of device, less memory, or a kernel "
                "that is wrong there"
            )
        reason = f"{member.place} is not used: {answer.reason}"
        self._refusals.append(reason)
        self.say(reason)
        self._dismiss(member)

    def _lose(self, member: _Member, reason: str) -> None:
        """Replaces a dead worker; its piece is done again."""
        self._dismiss(member)  # an unreachable one must not continue
        piece, member.piece = member.piece, None
        if piece is None:
            self._lost_starts += 1
            self._refusals.append(f"{member.place} died while starting: {reason}")
            if self._lost_starts >= _LOST_STARTS + (self.workers or 1):
                return
        else:
            self._died[piece] += 1
            if self._died[piece] >= _DEATHS:
                self._give_up(piece, f"{_DEATHS} workers died on it, the last one {member.place}")
            else:
                self._again.append(piece)
        self.say(f"{member.place} died; starting another")
        self._ask_for_one()

    def _count_failure(self, member: _Member, piece: Piece, reason: str) -> None:
        """The next try is on another worker, because this process may be at fault."""
        self._failed[piece] += 1
        self._reasons[reason] += 1
        if self._failed[piece] >= _FAILURES:
            self._give_up(piece, f"failed on {_FAILURES} workers: {reason}")
        else:
            self.say(f"{member.place}: {piece.named(self._candidates)}: {reason}; trying another worker")
            self._again.append(piece)
        self._dismiss(member)
        self._ask_for_one()

    def _give_up(self, piece: Piece, reason: str) -> None:
        self.failures[piece.named(self._candidates)] = reason

    def _dismiss(self, member: _Member) -> None:
        self._members.remove(member)
        self.pool.dismiss(member.worker)

    def _statistics(self, candidates: Sequence[Candidate]) -> str | None:
        from kl_lens.calibration import StoredStatistics

        if not any(candidate.recipe.quantizer.learns for candidate in candidates):
            return None
        stored = StoredStatistics.held_by(self.order.run)
        return None if stored is None else stored.digest
