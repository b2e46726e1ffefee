"""The one that gives pieces to Ray's workers and takes their results: whoever is free gets the largest piece left.

A worker that dies is replaced and its piece done again; a piece that fails on two workers, or takes several with it, is
named, and the rest goes on. Nothing is kept here: whoever asked commits results as they arrive.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from kl_lens.cluster.worker import Failed, Job, Order, Ready, Worker
from kl_lens.environment import processors
from kl_lens.errors import KLLensError, one_line
from kl_lens.samples import METRICS_VERSION
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.pieces import Found, Layout, Piece, key_of
from kl_lens.version import __version__

LOCAL = "local"
_FAILURES = 2  # on so many workers a piece fails before it is given up
_DEATHS = 5  # so many workers may die over a piece: that may have nothing to do with it
_LOST_STARTS = 5  # in a row, more than there are workers
_PATIENCE = 30.0  # seconds between two lines about waiting
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Of workers on this machine: Ray's 15 leaves them next to nothing where anybody else computes.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Told on standard output, in a paragraph; our line says the same.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
}


@dataclass(eq=False)
class _Member:
    """One worker, from when it is asked for until it is gone."""

    actor: Any
    place: str = "a worker"
    windows: tuple[int, ...] = ()  # whose teacher it has
    layout: Layout | None = None
    piece: Piece | None = None


@dataclass
class RayCrew:
    """Workers of a Ray cluster, or of one on this machine: a `Crew` of `sensitivity.sweep`.

    Example:
        >>> with RayCrew("local", order, workers=2) as crew:
        ...     Sweep(model, run, crew=crew).measure(candidates, windows)
    """

    address: str
    order: Order
    workers: int | None = None
    gpus_per_worker: float | None = None
    say: Callable[[str], None] = lambda text: None
    failures: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError:
            raise KLLensError("--ray needs Ray; install it with: pip install 'kl-lens[ray]'") from None
        self._ray = ray
        self._members: list[_Member] = []
        self._waiting: dict[Any, _Member] = {}  # what each has to answer
        self._job: Any = None
        self._layout: Layout | None = None
        self._lost_starts = self._jobs = 0
        self._refusals: list[str] = []
        try:
            self._connect()
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()  # the actors are this driver's and go with it

    # -- starting --------------------------------------------------------------------------------------

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            threads = max(processors(), self.workers or 1)
            self._ray.init(address=LOCAL, num_cpus=threads, include_dashboard=False, **quiet)
        else:
            _require_reachable(self.address)
            try:
                self._ray.init(address=self.address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise KLLensError(f"--ray {self.address}: {one_line(error)}") from None
            except SystemExit:  # Ray ends the process where a cluster does not answer
                raise KLLensError(f"--ray {self.address}: no Ray cluster answers there") from None
        there = self._ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), there.get("GPU", 0.0)
        on_gpu = str(self.order.how.get("device", "cpu")).startswith("cuda")
        each = self.gpus_per_worker if self.gpus_per_worker is not None else float(on_gpu)
        nodes = [int(n["Resources"].get("CPU", 0)) for n in self._ray.nodes() if n["Alive"]]
        count = self.workers or (int(gpus / each) if each else len(nodes)) or 1
        if count > cpus or each * count > gpus:
            raise KLLensError(
                f"--ray {self.address}: {count} workers need a CPU and {each:g} GPUs each; there are {cpus} CPUs and "
                f"{gpus:g} GPUs; ask for other --workers"
            )
        # As many threads as leave room for all of them, each within one machine.
        fitting = (t for t in range(cpus // count, 1, -1) if sum(cpu // t for cpu in nodes) >= count)
        self.order = replace(self.order, threads=next(fitting, 1), gpus=each)
        self.workers = count

    def _ask_for_one(self) -> None:
        options = {"num_cpus": self.order.threads, "num_gpus": self.order.gpus, "max_restarts": 0}
        remote = self._ray.remote(Worker).options(**options, scheduling_strategy="SPREAD")
        member = _Member(remote.remote(self.order))
        self._members.append(member)
        self._waiting[member.actor.hello.remote()] = member

    def begin(
        self, candidates: Sequence[Candidate], ids: torch.Tensor, precision: str | None, known: str | None
    ) -> Layout:
        """Every worker is told; the first that has opened the model says how the sweep is taken."""
        self.failures, self._layout = {}, None
        self._jobs += 1
        learnt = self._statistics(candidates)
        keys = tuple(key_of(candidate) for candidate in candidates)
        self._candidates = candidates
        self._job = Job(self._jobs, keys, ids.cpu().numpy().astype(np.int64), precision, known, learnt)
        for member in self._members:
            member.layout, member.windows = None, ()
            if member not in self._waiting.values():
                self._waiting[member.actor.begin.remote(self._job)] = member
        while len(self._members) < (self.workers or 1):
            self._ask_for_one()
        while self._layout is None:
            self._hear(self.say)
        return self._layout

    def cut(self, layout: Layout, costs: Sequence[float]) -> list[Piece]:
        return layout.spread(costs, self.workers or 1)

    # -- working ---------------------------------------------------------------------------------------

    def do(self, pieces: Iterable[Piece], message: Callable[[str], None]) -> Iterator[Found]:
        """Results as they arrive, until no piece is left that somebody can do."""
        self._queue = sorted(pieces, key=lambda piece: -piece.work)
        self._again: list[Piece] = []
        self._failed: Counter[Piece] = Counter()
        self._died: Counter[Piece] = Counter()
        while self._queue or self._again or any(member.piece for member in self._members):
            for member in self._members:
                if member.layout is not None and member.piece is None:
                    self._give(member)
            yield from self._hear(message)

    def _give(self, member: _Member) -> None:
        """The largest piece on the windows that the worker has; else of where the fewest work for what is left."""
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
        self._waiting[member.actor.do.remote(self._jobs, piece)] = member

    def _hear(self, message: Callable[[str], None]) -> Sequence[Found]:
        """Waits for one answer; what it brought, if it was a piece's."""
        if not self._waiting:
            raise KLLensError("; ".join(dict.fromkeys(self._refusals)) or "--ray: no worker is left")
        ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=_PATIENCE)
        if not ready:
            at_work = sum(member.piece is not None for member in self._members)
            message(f"{at_work} of {self.workers} workers at work, waiting for them")
            return []
        member = self._waiting.pop(ready[0])
        try:
            answer = self._ray.get(ready[0])
        except self._ray.exceptions.RayActorError as error:
            self._lose(member, error)
            return []
        except self._ray.exceptions.RayError as error:
            answer = Failed(one_line(error))
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
        """A worker that says who it is, or that it is ready."""
        if isinstance(answer, tuple):
            version, meaning, host, process = answer
            member.place = f"worker {process} on {host}"
            if (version, meaning) != (__version__, METRICS_VERSION):
                answer = Failed(
                    f"it has kl-lens {version} (metrics {meaning}), here it is {__version__} (metrics "
                    f"{METRICS_VERSION}); install the same everywhere"
                )
            else:
                self._waiting[member.actor.begin.remote(self._job)] = member
                return
        if isinstance(answer, Ready):
            self._lost_starts = 0
            if answer.job != self._jobs:  # it opened the model for an earlier sweep
                self._waiting[member.actor.begin.remote(self._job)] = member
                return
            if self._layout is None:
                self._layout = answer.layout
                # Those who come later have this one's precision, and choose none.
                self._job = replace(self._job, precision=answer.layout.precision)
            if answer.layout == self._layout:
                member.layout = answer.layout
                return
            answer = Failed(
                "it would compute otherwise than the others: another kind of device, or less memory"
            )
        reason = f"{member.place} is not used: {answer.reason}"
        self._refusals.append(reason)
        self.say(reason)
        self._dismiss(member)

    def _lose(self, member: _Member, error: Exception) -> None:
        """A worker that died: another takes its place, and its piece is done again."""
        self._dismiss(member)  # one that is only out of reach must not go on
        piece, member.piece = member.piece, None
        if piece is None:
            self._lost_starts += 1
            self._refusals.append(f"{member.place} died while it started: {_why(error)}")
            if self._lost_starts >= _LOST_STARTS + (self.workers or 1):
                return
        else:
            self._died[piece] += 1
            if self._died[piece] >= _DEATHS:
                self._give_up(piece, f"{_DEATHS} workers died over it, the last one {member.place}")
            else:
                self._again.append(piece)
        self.say(f"{member.place} died; another is asked for")
        self._ask_for_one()

    def _count_failure(self, member: _Member, piece: Piece, reason: str) -> None:
        """The next try is on another worker: what failed here may be this process's fault."""
        self._failed[piece] += 1
        if self._failed[piece] >= _FAILURES:
            self._give_up(piece, f"failed on {_FAILURES} workers: {reason}")
        else:
            self.say(
                f"{member.place}: {piece.named(self._candidates)}: {reason}; once more on another worker"
            )
            self._again.append(piece)
        self._dismiss(member)
        self._ask_for_one()

    def _give_up(self, piece: Piece, reason: str) -> None:
        self.failures[piece.named(self._candidates)] = reason

    def _dismiss(self, member: _Member) -> None:
        self._members.remove(member)
        self._ray.kill(member.actor)

    def _statistics(self, candidates: Sequence[Candidate]) -> str | None:
        from kl_lens.calibration import StoredStatistics
        from kl_lens.recipes import Recipe

        if not any(Recipe.parse(candidate.format).quantizer.learns for candidate in candidates):
            return None
        stored = StoredStatistics.held_by(self.order.run)
        return None if stored is None else stored.digest


def _why(error: Exception) -> str:
    """Of Ray's paragraph, the sentence that tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "dead because" in line]
    return one_line(ValueError((telling or lines or ["no reason given"])[-1]))


def _require_reachable(address: str, seconds: float = 10.0) -> None:
    """Ray itself tries for minutes."""
    place = address.removeprefix("ray://")
    host, colon, port = place.rpartition(":")
    if place == "auto":
        return
    if not colon or not port.isdigit():
        raise KLLensError(f"--ray {address}: write HOST:PORT of the cluster's head, auto, or {LOCAL}")
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise KLLensError(
            f"--ray {address}: cannot be reached ({one_line(error)}); is the head running (ray start --head)?"
        ) from None
