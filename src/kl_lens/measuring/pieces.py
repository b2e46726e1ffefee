"""Chooses a sweep's engine, and cuts it into pieces for any process to do: some groups of candidates on some windows.

Which windows share a batch and which candidates share a suffix is decided for the whole sweep. A piece has whole
batches and whole groups, so it gives the same bits in any process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring.engines import (
    ENGINES,
    Engine,
    FastEngine,
    PlainEngine,
    ranges,
)
from kl_lens.measuring.metrics import TeacherRows, check_finite, compare, window_metrics
from kl_lens.measuring.perturbation import Candidate, Kernels, key_of
from kl_lens.measuring.products import FLOAT32
from kl_lens.measuring.streamed import StreamedEngine
from kl_lens.model import LoadedModel
from kl_lens.run.readings import Reading, summarise

Group = tuple[int, ...]  # indices into the sweep's whole list of candidates
Done = Mapping[tuple[str, str], set[int]]  # (component, format) → windows


@dataclass(frozen=True)
class Piece:
    """Some groups on some windows; `noise`: measure the noise floor too."""

    windows: tuple[int, ...]
    groups: tuple[Group, ...]
    work: float
    noise: bool = False

    def left(self, candidates: Sequence[Candidate], stored: Done) -> Piece | None:
        """The piece without finished windows and groups; None if nothing is left."""

        def lacks(group: Group, windows: Iterable[int]) -> bool:
            return any(
                not stored.get(key_of(candidates[index]), set()).issuperset(windows)
                for index in group
            )

        windows = tuple(
            w for w in self.windows if any(lacks(group, [w]) for group in self.groups)
        )
        groups = tuple(group for group in self.groups if lacks(group, windows))
        share = len(windows) * len(groups) / max(1, len(self.windows) * len(self.groups))
        return (
            replace(self, windows=windows, groups=groups, work=self.work * share)
            if groups
            else None
        )


@dataclass(frozen=True)
class Layout:
    """How a sweep is divided. The same layout gives the same bits."""

    batch: int  # windows that run together
    groups: tuple[Group, ...]
    engine: str
    precision: str  # of products
    device: str
    windows: int  # of the text
    slab: int = field(compare=False)  # windows whose teacher states fit into memory
    fault: str = ""  # why our kernels are not used, if they should be

    def spread(
        self, costs: Sequence[float], workers: int, pieces_each: int = 16
    ) -> list[Piece]:
        """About `pieces_each` pieces per worker, at least one for each slab. `costs`: of each candidate on one window.
        The windows are cut into few ranges, because a worker has to run the teacher on each range that it works on."""
        batches = -(-self.windows // self.batch)
        stretch = self.batch * max(
            1, min(batches // max(1, workers), self.slab // self.batch)
        )
        size = sum(costs) * self.windows / (workers * pieces_each)
        pieces = []
        for windows in ranges(self.windows, stretch):
            members = list[Group]()
            work = 0.0
            for group in self.groups:
                members.append(group)
                work += _cost(group, costs)
                if work * len(windows) >= size:
                    pieces.append(self._piece(windows, tuple(members), costs))
                    members = []
                    work = 0.0
            if members:
                pieces.append(self._piece(windows, tuple(members), costs))
        return pieces

    def share(self, costs: Sequence[float], index: int, count: int) -> list[Piece]:
        """Share `index` (from 1) of `count` shares of about equal work."""
        pieces = self.spread(costs, count)
        whole = sum(piece.work for piece in pieces)
        before = 0.0
        chosen = []
        for piece in pieces:
            if index - 1 == min(
                count - 1, int((before + piece.work / 2) / whole * count)
            ):
                chosen.append(piece)
            before += piece.work
        return chosen

    def _piece(
        self, windows: Sequence[int], groups: tuple[Group, ...], costs: Sequence[float]
    ) -> Piece:
        """The piece with the first group on the first window also measures the noise floor."""
        work = sum(_cost(group, costs) for group in groups) * len(windows)
        return Piece(
            tuple(windows), groups, work, windows[0] == 0 and groups[0] == self.groups[0]
        )


@dataclass(frozen=True)
class Found:
    """Results that are committed together: the teacher on some windows, or a group of candidates."""

    teacher: tuple[
        tuple[int, int, float], ...
    ] = ()  # window, tokens with a target, summed cross-entropy
    noise: Mapping[str, float] | None = None
    candidates: tuple[tuple[int, tuple[Reading, ...]], ...] = ()  # index → its windows
    seconds: float = 0.0  # per candidate


class PieceRunner:
    """Does pieces of one sweep in this process and keeps the teacher of the last windows."""

    def __init__(self, job: Job, engine: Engine, sharers: int = 1) -> None:
        """`sharers`: processes that share the engine's memory budget."""
        self.engine = engine
        self.candidates = job.candidates
        self.ids = torch.from_numpy(np.array(job.ids))
        self._every = [candidate.perturbation for candidate in self.candidates]
        self._prepared: tuple[int, ...] = ()
        count, length = self.ids.shape
        slab = engine.slab_windows(length)
        self._first = self.ids[:slab]
        batch = min(engine.batch_windows(length), slab, count)
        groups = tuple(map(tuple, engine.groups(self._every, batch * length)))
        if sharers > 1:  # smaller slabs, but the same batches and so the same bits
            engine.sharers = sharers
            slab = max(batch, engine.slab_windows(length))
        kind = engine.chain.device.type
        fault = engine.chain.fault
        self.layout = Layout(
            batch, groups, engine.name, engine.precision, kind, count, slab, fault
        )

    def do(self, piece: Piece) -> Iterator[Found]:
        """Whole groups on whole batches, a slab at a time."""
        for slab in ranges(len(piece.windows), self.layout.slab):
            windows = piece.windows[slab.start : slab.stop]
            if windows != self._prepared:
                yield self._prepare(windows)
            if piece.noise and slab.start == 0:
                yield Found(noise=noise_floor(self.engine, self._first))
            begin = time.perf_counter()
            groups = map(list, piece.groups)
            for group, results in self.engine.in_turn(self._every, groups):
                seconds = (time.perf_counter() - begin) / len(group)
                begin = time.perf_counter()
                members = []
                for index, measured in zip(group, results, strict=True):
                    readings = tuple(
                        replace(r, window=windows[r.window]) for r in measured
                    )
                    check_finite(
                        str(self.candidates[index]), [(r.window, r.kl) for r in readings]
                    )
                    members.append((index, readings))
                yield Found(candidates=tuple(members), seconds=seconds)

    def _prepare(self, windows: tuple[int, ...]) -> Found:
        ids = self.ids[list(windows)]
        self._prepared = ()
        self.engine.prepare(ids)
        self._prepared = windows
        entropies = self.engine.teacher_cross_entropy().tolist()
        counts = (self.engine.chain.task.targets(ids) >= 0).sum(1).tolist()
        check_finite("the original model", [*zip(windows, entropies, strict=True)])
        return Found(teacher=tuple(zip(windows, counts, entropies, strict=True)))


def _cost(group: Group, costs: Sequence[float]) -> float:
    return sum(costs[index] for index in group)


@dataclass(frozen=True)
class Job:
    """One sweep, for any process that has the model open."""

    ids: npt.NDArray[np.int64]
    candidates: Sequence[Candidate] = ()
    engine: str = FastEngine.name
    memory_budget: int = DEFAULT_MEMORY
    deployed: Kernels | None = None
    precision: str | None = None  # None: the fastest with float32's accuracy
    statistics: str | None = None  # digest of those that methods learn from
    run: str = ""  # the folder that holds them

    def engine_on(
        self, model: LoadedModel, say: Callable[[str], None] = lambda text: None
    ) -> Engine:
        """The engine of this name; for a model that cannot run in parts the plain one, with a message that says why."""
        kind = ENGINES[self.engine]
        if kind is FastEngine:
            doubt = model.chain.doubt(torch.from_numpy(np.array(self.ids)))
            if doubt is not None:
                say(
                    f"{model.name}: {doubt}; using the plain engine, which runs the whole model for every candidate"
                )
                kind = PlainEngine
            elif model.residency is not None:
                kind = StreamedEngine
        return kind(model, self.memory_budget, self.deployed, self.precision)


def noise_floor(engine: Engine, ids: Tensor) -> dict[str, float]:
    """What is measured when there is no difference: the teacher against itself in another batch position.

    On tensor cores: twice their distance from float32, because teacher and student both run on them.
    """
    ids = ids[:2].to(engine.chain.device)
    sides = 1 if engine.precision == FLOAT32 else 2
    together = engine.chain.full_logits(ids)
    targets = torch.full((ids.shape[1],), -1, device=ids.device)
    metrics: list[Reading] = []
    for index in range(len(ids)):
        alone = engine.logits(ids[index : index + 1])[0]
        rows = compare(TeacherRows.of(together[index], targets), alone)
        # The signal is for the SQNR, which is not asked for.
        metrics += window_metrics(
            [index], rows, np.ones(len(rows)), targets[None], engine.vocabulary
        )
    summary = summarise(metrics)
    names = ("kl_teacher_to_student", "kl_student_to_teacher", "mse", "kl_max")
    return {name: sides * summary[name].value for name in names}
