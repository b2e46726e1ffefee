"""Does the pieces of a sweep in other processes: on this machine, or on a Ray cluster.

A worker is a standard process pool of one process, or a Ray actor. It has its own copy of the model. If it dies, the
piece it was doing is done again, by another worker or by the process that asked. Nothing is stored here: the sweep
commits results as they arrive.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kl_lens.base.aside import Aside, aside
from kl_lens.base.errors import KLLensError, RunError, last_line, one_line
from kl_lens.base.system import available_memory, processors
from kl_lens.base.units import human_bytes
from kl_lens.base.version import __version__
from kl_lens.measuring.pieces import Found, Job, Layout, Piece, PieceRunner
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel, load
from kl_lens.run.readings import METRICS_VERSION

MANY_CORES = 8
LEAST_WORKERS = 4  # on fewer cores, one process keeps all of them busy
# Operations per core below which starting workers costs more than it saves: on 16 cores a quarter of this took one
# process 15.9 s, of which workers saved a third, and starting them took 17 s.
LEAST_OPERATIONS = 1.5e12
# Memory of a process before it opens a model: Python, torch, transformers, compiled kernels.
PROCESS_BYTES = 600 * 10**6
_MOST = 4  # workers per processor; more would only wait for each other
_SETBACKS = (
    3  # after so many failures without a result between them, no more workers are started
)
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15, the default, leaves workers almost no time if anything else runs
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def workers_by_default(
    cores: int, copy_bytes: int, budget: int, free: int, operations: float
) -> int:
    """The default number of processes for a sweep on a CPU; 1: only this one, with all threads.

    Products of a small model are too small for many cores, but candidates are independent. So workers with two threads
    each: on 16 cores as fast as twice as many with one thread, at half the memory. If so many copies (weights, and the
    states of a batch) do not fit into budget and free memory, half as many with twice the threads, and so on.
    """
    if cores < MANY_CORES or operations < cores * LEAST_OPERATIONS:
        return 1
    counts = [cores >> step for step in range(1, cores.bit_length())]
    fitting = (
        n
        for n in counts
        if n * copy_bytes <= budget and n * (copy_bytes + PROCESS_BYTES) <= free
    )
    return next((n for n in fitting if n >= LEAST_WORKERS), 1)


def threads_here() -> int:
    """The threads torch uses: one per core of this process, or OMP_NUM_THREADS."""
    return min(processors(), torch.get_num_threads())


@dataclass(frozen=True)
class Order:
    """The model that every worker opens, and with what."""

    model: str  # a name or path valid on every machine
    opening: Mapping[str, Any]  # dtype, device, …
    fingerprint: str
    threads: int = 1
    gpus: int = 0
    sharers: int = 1  # workers that share the memory budget
    version: tuple[str, int] = (__version__, METRICS_VERSION)


class Worker:
    """In a process of its own: opens the model once, and does pieces of one sweep after another."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._number = 0
        self._model: LoadedModel | None = None
        self._runner: PieceRunner | None = None

    def do(
        self, number: int, job: Job, layout: Layout | None, piece: Piece | None
    ) -> list[Found] | Layout | str:
        """The results of a piece, or without one the layout of sweep `number`; as text, why it failed.

        `layout`: that of the other workers.
        """
        try:
            if number != self._number or self._runner is None:
                self._runner = None  # free the last sweep's teacher first
                self._runner = self._prepared(job)
                self._number = number
            if layout not in (None, self._runner.layout):
                raise RunError(
                    "it would compute differently from the others: another kind of device, less memory, or a kernel "
                    "that is wrong there"
                )
            return self._runner.layout if piece is None else list(self._runner.do(piece))
        except Exception as error:  # a library's error costs one piece, not the sweep
            kind = "" if isinstance(error, KLLensError) else f"{type(error).__name__}: "
            return (
                f"worker {os.getpid()} on {platform.node()}: {kind}{one_line(error, 500)}"
            )

    def _prepared(self, job: Job) -> PieceRunner:
        model = self._model = self._model or self._opened()
        if job.statistics is not None:
            stored = StoredStatistics.held_by(Path(job.run))
            if stored is None or stored.digest != job.statistics:
                raise RunError(
                    f"it cannot read the statistics in {job.run}; put the run on a shared disk, or measure methods "
                    "without statistics"
                )
            model.weights.learn_from(StoredStatistics.open(Path(job.run), model))
        return PieceRunner(job, job.engine_on(model), self._order.sharers)

    def _opened(self) -> LoadedModel:
        import numba

        order = self._order
        version = (__version__, METRICS_VERSION)
        if order.version != version:
            raise RunError(
                "it has kl-lens {} (metrics {}), the command {} (metrics {}); install the same version "
                "everywhere".format(*version, *order.version)
            )
        torch.set_num_threads(order.threads)
        numba.set_num_threads(min(order.threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        model = load(order.model, **order.opening)
        model.warn = lambda _: None  # the layout says it
        if model.fingerprint != order.fingerprint:
            raise RunError(f"{order.model} has other weights there than here")
        return model


class Workers:
    """Maps the pieces of a sweep to results as they come."""

    def __init__(
        self, hire: Callable[[], Aside], count: int, say: Callable[[str], None]
    ) -> None:
        self.count = count
        self._hire = hire
        self._say = say
        self._number = 0  # of the sweep
        self._busy: dict[Future[Any], tuple[Aside, int, Piece | None]] = {}
        self._idle: dict[
            Aside, tuple[int, ...]
        ] = {}  # worker → windows whose teacher it has
        self.reason = ""  # why a worker failed last

    def begin(self, job: Job) -> Layout:
        """Starts a sweep. The first worker that is ready says how it is divided."""
        self._job = job
        self._number = self._number + 1
        self._setbacks = 0
        self._layout: Layout | None = None
        idle, self._idle = self._idle, {}
        lacking = self.count - len(idle) - len(self._busy)
        for worker in [*idle, *(self._hire() for _ in range(lacking))]:
            self._give(worker)
        while self._layout is None:
            if not self._busy:
                raise KLLensError(f"no worker could start: {self.reason}")
            if not self._heard():
                self._say("waiting for the first worker to start")
        return self._layout

    def do(self, pieces: Sequence[Piece]) -> Generator[Found, None, list[Piece]]:
        """Yields results as they come; returns the pieces that no worker could do."""
        queue = list(pieces)
        again = list[Piece]()
        results = list[Found]()
        while True:
            while self._idle and (pending := queue or again):  # what failed comes last
                worker, windows = self._idle.popitem()
                self._give(worker, _taken(pending, windows))
            yield from results  # workers do not wait until this is committed
            if not self._busy or not (
                queue or again or any(piece for _, _, piece in self._busy.values())
            ):
                return queue + again
            heard = [
                (piece, answer) for piece, answer in self._heard() if piece is not None
            ]
            again += [piece for piece, answer in heard if isinstance(answer, str)]
            results = [
                result
                for _, answer in heard
                if not isinstance(answer, str)
                for result in answer
            ]

    def close(self) -> None:
        for worker in (*self._idle, *(worker for worker, _, _ in self._busy.values())):
            worker.end()

    def _give(self, worker: Aside, piece: Piece | None = None) -> None:
        try:
            future = worker.submit(self._number, self._job, self._layout, piece)
        except BrokenExecutor as error:  # it died while it had nothing to do
            future = Future()
            future.set_exception(error)
        self._busy[future] = worker, self._number, piece

    def _heard(self) -> list[tuple[Piece | None, Any]]:
        """Waits for answers; replaces workers that failed."""
        heard = []
        for future in wait(self._busy, 30, FIRST_COMPLETED).done:
            worker, number, piece = self._busy.pop(future)
            try:
                answer = future.result()
            except Exception as error:  # BrokenProcessPool, or one of Ray's
                answer = f"a worker died: {last_line(error)}"
            heard.append((piece, answer))
            if isinstance(answer, str):
                worker.end()
                self.reason = answer
                self._setbacks = self._setbacks + 1
                replaced = self._setbacks <= _SETBACKS
                self._say(
                    f"{answer}; {'starting another' if replaced else 'going on without it'}"
                )
                if replaced:
                    self._give(self._hire())
                continue
            self._idle[worker] = piece.windows if piece else ()
            if piece is not None:
                self._setbacks = 0
            elif number == self._number:
                self._layout = self._layout or answer
        return heard


def _taken(pieces: list[Piece], windows: tuple[int, ...]) -> Piece:
    """The largest piece on these windows, whose teacher the worker has, or on those with the most work left."""
    work_on: dict[tuple[int, ...], float] = {}
    for piece in pieces:
        work_on[piece.windows] = work_on.get(piece.windows, 0.0) + piece.work
    best = max(
        pieces,
        key=lambda piece: (piece.windows == windows, work_on[piece.windows], piece.work),
    )
    pieces.remove(best)
    return best


@contextmanager
def hired(
    order: Order,
    count: int | None,
    ray: str | None = None,
    copy_bytes: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Workers]:
    """Workers on this machine, or on the Ray cluster at this address; `count` None: one, on a cluster one per GPU, or
    per machine without GPUs. `copy_bytes`: of one worker's model."""
    with ExitStack() as ending:
        if ray is None:
            count = count or 1
            worker_bytes = copy_bytes + PROCESS_BYTES
            free = available_memory()
            most = max(1, min(_MOST * processors(), free // worker_bytes))
            if count > most:
                raise KLLensError(
                    f"--workers {count}: {processors()} processors and {human_bytes(free)} of free memory are enough "
                    f"for {most}; each needs {human_bytes(worker_bytes)}"
                )
            order = replace(order, threads=max(1, threads_here() // count), sharers=count)
        else:
            library = _ray(ray, count)
            ending.callback(library.shutdown)
            order, count = _on_ray(library, ray, order, count)
        workers = Workers(
            lambda: _actor(library, order) if ray else _process(order), count, say
        )
        ending.callback(workers.close)
        yield workers


_worker: Worker  # in a process of its own


def _become(order: Order) -> None:
    global _worker
    _worker = Worker(order)


def _do(*work: Any) -> Any:
    return _worker.do(*work)


def _process(order: Order) -> Aside:
    process = aside(order.threads, _become, order, several=True)
    return Aside(partial(process.submit, _do), process.end)


def _actor(ray: Any, order: Order) -> Aside:
    """A worker on a Ray cluster."""
    options = {
        "num_cpus": order.threads,
        "num_gpus": order.gpus,
        "scheduling_strategy": "SPREAD",
    }
    actor = ray.remote(Worker).options(**options).remote(order)
    return Aside(lambda *work: actor.do.remote(*work).future(), partial(ray.kill, actor))


def _ray(address: str, count: int | None) -> Any:
    """Ray, connected to a cluster."""
    os.environ |= {
        name: os.environ.get(name, value) for name, value in _RAY_SETTINGS.items()
    }
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        import ray

        if address == "local":
            options |= {
                "num_cpus": max(processors(), count or 1),
                "include_dashboard": False,
            }
        elif address != "auto":  # Ray itself tries for minutes
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, **options)
    except ImportError:
        raise KLLensError(
            "--ray needs Ray; install it with: pip install 'kl-lens[ray]'"
        ) from None
    except (Exception, SystemExit) as error:  # Ray raises many kinds
        raise KLLensError(
            f"--ray {address}: no cluster answers there ({one_line(error)}); give HOST:PORT of its head (ray start "
            "--head), auto, or local"
        ) from None
    return ray


def _on_ray(ray: Any, address: str, order: Order, count: int | None) -> tuple[Order, int]:
    """The order with each worker's threads and GPU, and the number of workers."""
    resources = ray.cluster_resources()
    cpus = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    wanted = str(order.opening.get("device", "cpu"))
    gpus_each = int(wanted.startswith("cuda") or (wanted == "auto" and gpus > 0))
    nodes = [
        int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]
    ]
    count = count or (gpus if gpus_each else len(nodes)) or 1
    if count > cpus or gpus_each * count > gpus:
        raise KLLensError(
            f"--ray {address}: {count} workers need a CPU and {gpus_each} GPUs each; there are {cpus} CPUs and {gpus} "
            "GPUs; use fewer --workers"
        )
    # As many threads as possible with each worker inside one machine.
    fitting = (
        t for t in range(cpus // count, 1, -1) if sum(cpu // t for cpu in nodes) >= count
    )
    return replace(order, threads=next(fitting, 1), gpus=gpus_each), count
