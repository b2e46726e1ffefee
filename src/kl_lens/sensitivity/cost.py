"""Forecasts the cost of a sweep: a few parts of it are timed here and scaled up.

A candidate costs the blocks from its own to the end, a constant part (head and metrics), and its quantizing. Blocks are
timed one by one, candidates at three depths of the network. Disk and memory are estimated too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.environment import peak_memory
from kl_lens.journal import FILE
from kl_lens.recipes import Recipe
from kl_lens.runs import Run
from kl_lens.samples import WindowMetrics
from kl_lens.sensitivity.engines import Engine, FastEngine
from kl_lens.sensitivity.perturbation import Candidate, Perturbation, first_block, replacements
from kl_lens.sensitivity.pieces import Group, Layout

_SECONDS = 2.0  # longest timed forward, unless a single window takes longer


@dataclass(frozen=True)
class Item:
    """What a candidate's cost depends on."""

    start: int  # its block; -1 before the first, the number of blocks behind the last
    recipe: Recipe
    parameters: int


@dataclass(frozen=True)
class Rates:
    """Measured rates of one machine or worker, in seconds unless noted."""

    starting: float  # until the process can open the model
    opening: float
    teacher: float  # per window
    blocks: tuple[float, ...]  # per window
    same: float  # per window and candidate: head and metrics
    quantizing: dict[Recipe, float]  # seconds per parameter
    committing: float  # per window and candidate
    memory: int  # at the peak
    disk: float  # bytes, per window and candidate


@dataclass(frozen=True)
class SweepCost:
    """A sweep with several workers, each on a machine like this one."""

    workers: int
    seconds: float
    starting: float  # part of `seconds`: starting the process and opening the model
    teacher: float  # part of `seconds`: running the original model
    committing: float  # total, in one process beside the workers
    memory: int  # of each worker
    disk: int
    efficiency: float  # seconds of one process / (workers × seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def items_of(model: LoadedModel, candidates: Sequence[Candidate]) -> list[Item]:
    return [
        Item(first_block(model.anatomy, c.perturbation), c.recipe, c.component.parameters) for c in candidates
    ]


def estimate(
    rates: Rates, items: Sequence[Item], windows: int, batch: int, slab: int, workers: int
) -> SweepCost:
    """The time of the slowest worker: it starts, runs the original model on its windows, and does its share."""
    some = _taken(rates, items, windows, batch, slab, workers)
    alone = some if workers == 1 else _taken(rates, items, windows, batch, slab, 1)
    return replace(some, efficiency=alone.seconds / (workers * some.seconds))


def _taken(
    rates: Rates, items: Sequence[Item], windows: int, batch: int, slab: int, workers: int
) -> SweepCost:
    behind = [0.0, *np.cumsum(rates.blocks[::-1])]  # behind[n]: the last n blocks
    suffix = [behind[len(rates.blocks) - max(0, min(item.start + 1, len(rates.blocks)))] for item in items]
    each = [s + rates.same for s in suffix]  # per window
    batches = -(-windows // batch)
    # Windows on which a worker runs the teacher.
    stretch = min(windows, batch * max(1, min(batches // workers, slab // batch)))
    stretches = -(-windows // stretch)
    quantizing = sum(rates.quantizing.get(item.recipe, 0.0) * item.parameters for item in items) * stretches
    arithmetic = sum(each) * windows + quantizing
    teacher = rates.teacher * (windows if workers == 1 else stretch * max(1, round(stretches / workers)))
    noise = 2 * rates.teacher * min(4, windows, slab)
    committing = rates.committing * len(items) * windows
    # A worker's smallest unit is one candidate; on average the last one is half done when the other workers finish.
    tail = 0.0 if workers == 1 else max(each) * min(stretch, batch) / 2
    shared = max((arithmetic + noise) / workers, committing if workers > 1 else 0.0)
    seconds = rates.starting + rates.opening + teacher + shared + tail + (committing if workers == 1 else 0.0)
    return SweepCost(
        workers=workers,
        seconds=seconds,
        starting=rates.starting + rates.opening,
        teacher=teacher,
        committing=committing,
        memory=rates.memory,
        disk=int(rates.disk * len(items) * windows),
        efficiency=1.0,
    )


def measured_rates(
    engine: Engine, candidates: Sequence[Candidate], ids: torch.Tensor, starting: float, opening: float
) -> tuple[Rates, Layout]:
    """Times a few seconds of the sweep itself; the caller passes the time of the steps before it."""
    layout = Layout.of(engine, candidates, ids)
    some = _how_many(engine, ids, layout)
    engine.prepare(ids[:1])  # warm up: compilation and other one-time work
    _group(engine, candidates, layout.groups[-1])
    teacher = _timed(engine, lambda: engine.prepare(ids[:some]))
    blocks = _block_seconds(engine)
    items = items_of(engine.model, candidates)
    quantizing = _quantizing(engine, candidates)
    places: list[tuple[float, float]] = []  # seconds of the blocks behind, seconds of the candidate
    for group in _spread(layout.groups, items, len(blocks)):
        taken = _timed(engine, lambda g=group: _group(engine, candidates, g)) / len(group)  # type: ignore[misc]
        item = items[group[0]]
        taken -= quantizing.get(item.recipe, 0.0) * item.parameters
        places.append((sum(blocks[max(0, item.start + 1) :]), max(taken, 0.0)))
    slope, same = _line(places)
    committing, disk = _journal(int(ids.shape[1]))
    rates = Rates(
        starting=starting,
        opening=opening,
        teacher=teacher / some,
        blocks=tuple(slope * b / some for b in blocks),
        same=same / some,
        quantizing=quantizing,
        committing=committing,
        memory=_memory(engine, ids, layout, some),
        disk=disk,
    )
    return rates, layout


def _how_many(engine: Engine, ids: torch.Tensor, layout: Layout) -> int:
    """Windows to time with: a whole batch, if that takes no longer than `_SECONDS`."""
    engine.prepare(ids[:1])
    one = _timed(engine, lambda: engine.prepare(ids[:1]))
    return max(1, min(layout.batch, int(_SECONDS / max(one, 1e-6))))


def _block_seconds(engine: Engine) -> list[float]:
    """Each block's time on the teacher's inputs; zeros for an engine that does not run blocks."""
    if not isinstance(engine, FastEngine):
        return [0.0] * engine.model.anatomy.blocks
    (batch,) = engine.teacher.batches
    seconds = []
    with engine.teacher.running():
        for index, entering in enumerate(batch.inputs):
            run = lambda i=index, e=entering: engine.chain.run(e, batch.calls, i, i + 1)  # noqa: E731
            seconds.append(_timed(engine, run))
    return seconds


def _spread(groups: Sequence[Group], items: Sequence[Item], blocks: int) -> list[Group]:
    """Groups from the first, middle and last blocks; if there are none, any groups."""
    inside = [group for group in groups if 0 <= items[group[0]].start < blocks] or list(groups)
    inside.sort(key=lambda group: items[group[0]].start)
    return list(dict.fromkeys((inside[0], inside[len(inside) // 2], inside[-1])))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y ≈ slope · x + same, neither below zero."""
    x, y = np.array(points).T
    if np.ptp(x) == 0:
        return 1.0, max(0.0, float((y - x).mean()))
    slope, same = np.polyfit(x, y, 1)
    if same < 0:
        return float((x * y).sum() / (x * x).sum()), 0.0
    return (float(slope), float(same)) if slope > 0 else (0.0, float(y.mean()))


def _group(engine: Engine, candidates: Sequence[Candidate], group: Sequence[int]) -> None:
    engine.started([candidates[index].perturbation for index in group])()


def _quantizing(engine: Engine, candidates: Sequence[Candidate]) -> dict[Recipe, float]:
    """Seconds per parameter of each recipe, timed on a component of medium size."""
    by_recipe: dict[Recipe, list[Candidate]] = {}
    for candidate in candidates:
        by_recipe.setdefault(candidate.recipe, []).append(candidate)
    seconds = {}
    for recipe, members in by_recipe.items():
        members.sort(key=lambda c: c.component.parameters)
        middle = members[len(members) // 2].component
        make = lambda c=middle, r=recipe: replacements(  # noqa: E731
            engine.model, Perturbation.single(c.name, r), engine.deployed
        )
        if middle.parameters < 10**7:
            make()  # compiles kernels
        seconds[recipe] = _timed(engine, make) / middle.parameters
    return seconds


def _timed(engine: Engine, work: Callable[[], Any]) -> float:
    """The median of three runs, against noise from other processes; long runs are timed fewer times."""
    wait = torch.cuda.synchronize if engine.chain.device.type == "cuda" else lambda: None
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _SECONDS / 2:
        wait()
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _journal(length: int, rows: int = 64) -> tuple[float, float]:
    """Seconds and bytes to commit one candidate × window to a journal."""
    windows = [
        WindowMetrics(w, length, length, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, bytes(4 * length)) for w in range(8)
    ]
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            with Run.create(Path(folder)) as run:
                begin = time.perf_counter()
                for candidate in range(rows // len(windows)):
                    run.store_samples(
                        "role", f"model.layers.{candidate}.mixer", name, windows, 0.0, "float32"
                    )
                seconds = time.perf_counter() - begin
            sizes.append((Path(folder) / FILE).stat().st_size)
    return seconds / rows, (sizes[1] - sizes[0]) / rows


def _memory(engine: Engine, ids: torch.Tensor, layout: Layout, some: int) -> int:
    """Peak memory of a whole slab: kept states grow with its windows, working memory with those of a batch."""
    slab = min(layout.slab, len(ids))
    batch = min(layout.batch, slab)
    kept, peak = _kept(engine), peak_memory()
    if engine.chain.device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated())
    whole = min(kept * slab // some, max(engine.states_budget, kept))
    every = (m for block in engine.chain.blocks for m in block.modules())
    layers = [m for m in every if isinstance(m, torch.nn.Linear)]
    widest = max((max(m.in_features, m.out_features) for m in layers), default=0)
    working = 10 * 4 * widest * int(ids.shape[1])  # per window of a batch: a block's tensors
    return int(peak + whole - kept + working * (batch - some))


def _kept(engine: Engine) -> int:
    """Bytes that the prepared teacher keeps."""
    if not isinstance(engine, FastEngine):
        return 0
    total = 0
    for batch in engine.teacher.batches:
        tensors = [batch.states, batch.logits, *(getattr(s, "hidden", None) for s in batch.inputs)]
        total += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        total += sum(memo.bytes for memo in batch.memos if memo is not None)
    return total
