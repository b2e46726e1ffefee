"""A worker opens the model once, then measures pieces of a sweep, in its own process."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens.environment import set_defaults

set_defaults()  # before torch is loaded, as the command line does

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import torch  # noqa: E402

from kl_lens.calibration import StoredStatistics  # noqa: E402
from kl_lens.checkpoints import LoadedModel, load  # noqa: E402
from kl_lens.errors import KLLensError, RunError, one_line  # noqa: E402
from kl_lens.recipes import Recipe  # noqa: E402
from kl_lens.samples import METRICS_VERSION  # noqa: E402
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, memory_on  # noqa: E402
from kl_lens.sensitivity.perturbation import Candidate  # noqa: E402
from kl_lens.sensitivity.pieces import Found, Layout, Piece, PieceRunner  # noqa: E402
from kl_lens.sensitivity.sweep import chosen_engine  # noqa: E402
from kl_lens.targets import deployed  # noqa: E402
from kl_lens.version import __version__  # noqa: E402


@dataclass(frozen=True)
class Order:
    """The model and how to measure it, the same for every worker."""

    model: str  # a name or path valid on every machine
    how: Mapping[str, Any]  # dtype, device, …
    fingerprint: str
    engine: str
    memory_budget: int
    target: str | None  # measure as this target computes
    run: Path  # holds the statistics; must be readable by every worker
    threads: int = 1
    gpus: float = 0.0
    sharers: int = 1  # workers that share the memory budget


@dataclass(frozen=True)
class Job:
    """One sweep: candidates as (component, recipe), and windows of ids."""

    number: int
    candidates: tuple[tuple[str, Recipe], ...]
    ids: npt.NDArray[np.int64]
    precision: str | None  # requested
    known: str | None  # the run's
    statistics: str | None  # digest of the statistics that recipes learn from


@dataclass(frozen=True)
class Ready:
    """The worker is ready for this sweep."""

    job: int
    layout: Layout


@dataclass(frozen=True)
class Failed:
    """An error, returned as a value: an exception would arrive as Ray's, or not at all."""

    reason: str


class Worker:
    """Holds a model and the teacher of its current windows."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._model: LoadedModel | None = None
        self._runner: PieceRunner | None = None
        self._job = -1

    def hello(self) -> tuple[str, int, str, int]:
        """Versions of package and metrics, host, process."""
        return __version__, METRICS_VERSION, platform.node(), os.getpid()

    def begin(self, job: Job) -> Ready | Failed:
        """Prepares a sweep; opens the model the first time."""
        return _or_failed(lambda: Ready(job.number, self._begin(job)))

    def do(self, number: int, piece: Piece) -> Sequence[Found] | Failed:
        runner = self._runner
        if runner is None or number != self._job:
            return Failed("it was not prepared for this sweep")
        return _or_failed(lambda: list(runner.do(piece)))

    def _begin(self, job: Job) -> Layout:
        self._runner = None  # free the last sweep's teacher first
        model = self._opened()
        candidates = [Candidate(model.anatomy.component(name), recipe) for name, recipe in job.candidates]
        if job.statistics is not None:
            self._learn(model, job.statistics)
        ids = torch.from_numpy(np.array(job.ids))
        order = self._order
        engine = chosen_engine(
            model, candidates, ids, order.engine, self._memory(model), deployed(order.target), job.precision, job.known
        )  # fmt: skip
        self._runner, self._job = PieceRunner(engine, candidates, ids, order.sharers), job.number
        return self._runner.layout

    def _opened(self) -> LoadedModel:
        if self._model is None:
            use_threads(self._order.threads)
            model = load(self._order.model, **self._order.how)
            model.warn = lambda _: None  # the layout says it
            if model.fingerprint != self._order.fingerprint:
                raise RunError(f"{self._order.model} has other weights on the worker's machine than here")
            self._model = model
        return self._model

    def _memory(self, model: LoadedModel) -> int:
        """Workers that share a GPU divide its free memory."""
        budget, device = self._order.memory_budget, model.chain.device
        if device.type == "cuda" and budget == DEFAULT_MEMORY and self._order.gpus < 1:
            return int(memory_on(device, budget) * self._order.gpus)
        return budget

    def _learn(self, model: LoadedModel, digest: str) -> None:
        stored = StoredStatistics.held_by(self._order.run)
        if stored is None or stored.digest != digest:
            raise RunError(
                f"the worker cannot read the statistics in {self._order.run}; put the run on a shared disk, or measure "
                "methods without statistics"
            )
        model.weights.learn_from(StoredStatistics.open(self._order.run, model))


def _or_failed(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except KLLensError as error:
        return Failed(str(error))
    except Exception as error:  # a library's error costs one piece or worker, not the sweep
        return Failed(f"{type(error).__name__}: {one_line(error)}")


def use_threads(count: int) -> None:
    """Sets the threads of torch and numba."""
    import numba

    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
