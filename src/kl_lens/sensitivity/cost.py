"""What a sweep will take, before it begins: a few pieces of it timed here, the rest by how much more there is.

A candidate costs the blocks behind it, something that is the same for all (the head, the metrics), and its quantizing.
Blocks are timed one by one, candidates in three places of the network; what is kept, on disk and in memory, is weighed.
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

_SECONDS = 2.0  # of one forward, at most, unless a single window takes longer


@dataclass(frozen=True)
class Item:
    """What makes one candidate's cost."""

    start: int  # the block it is in; -1 before them all, their number behind them
    recipe: Recipe
    parameters: int


@dataclass(frozen=True)
class Rates:
    """What things take on one machine, or one worker; of what is per window, seconds for one."""

    starting: float  # the process, until it can open the model
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
    """A sweep by so many workers, each on a machine like this one."""

    workers: int
    seconds: float
    starting: float  # of these: start and opening
    teacher: float  # what a worker spends on the original model
    committing: float  # in all, in one process beside the workers
    memory: int  # of each worker
    disk: int
    efficiency: float  # of one process's seconds, over workers × seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def items_of(model: LoadedModel, candidates: Sequence[Candidate]) -> list[Item]:
    return [
        Item(first_block(model.anatomy, c.perturbation), c.recipe, c.component.parameters) for c in candidates
    ]


def estimate(
    rates: Rates, items: Sequence[Item], windows: int, batch: int, slab: int, workers: int
) -> SweepCost:
    """The seconds of the worker that ends last: it starts, runs the original model on its windows, does its share."""
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
    stretch = min(
        windows, batch * max(1, min(batches // workers, slab // batch))
    )  # windows that a worker prepares
    stretches = -(-windows // stretch)
    quantizing = sum(rates.quantizing.get(item.recipe, 0.0) * item.parameters for item in items) * stretches
    arithmetic = sum(each) * windows + quantizing
    teacher = rates.teacher * (windows if workers == 1 else stretch * max(1, round(stretches / workers)))
    noise = 2 * rates.teacher * min(4, windows, slab)
    committing = rates.committing * len(items) * windows
    # Nobody can do less than one candidate on its windows; on average the last one is half done when the others end.
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
    """A few seconds of the sweep itself; what came before it is known to the caller."""
    layout = Layout.of(engine, candidates, ids)
    some = _how_many(engine, ids, layout)
    engine.prepare(ids[:1])  # whatever is done once, compiled for instance, is done
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
    """Windows to time with: a whole batch, where that takes no longer than a moment."""
    engine.prepare(ids[:1])
    one = _timed(engine, lambda: engine.prepare(ids[:1]))
    return max(1, min(layout.batch, int(_SECONDS / max(one, 1e-6))))


def _block_seconds(engine: Engine) -> list[float]:
    """Each block on the teacher's own inputs; nothing for an engine that knows no blocks."""
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
    """Groups from the beginning, the middle and the end of the blocks; without any there, whatever there is."""
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
    """Seconds per parameter of each recipe: of a component of middle size."""
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
            make()  # compiled
        seconds[recipe] = _timed(engine, make) / middle.parameters
    return seconds


def _timed(engine: Engine, work: Callable[[], Any]) -> float:
    """The median of three, unless it takes long: a machine is never as quiet as one would like."""
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
    """Seconds and bytes of a candidate's window in a journal."""
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
    """The peak of a whole slab: what is kept grows with its windows, what is worked with, with those of a batch."""
    slab = min(layout.slab, len(ids))
    batch = min(layout.batch, slab)
    kept, peak = _kept(engine), peak_memory()
    if engine.chain.device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated())
    whole = min(kept * slab // some, max(engine.states_budget, kept))
    every = (m for block in engine.chain.blocks for m in block.modules())
    layers = [m for m in every if isinstance(m, torch.nn.Linear)]
    widest = max((max(m.in_features, m.out_features) for m in layers), default=0)
    working = 10 * 4 * widest * int(ids.shape[1])  # of each window of a batch: what a block has at once
    return int(peak + whole - kept + working * (batch - some))


def _kept(engine: Engine) -> int:
    """Bytes of the teacher that is prepared."""
    if not isinstance(engine, FastEngine):
        return 0
    total = 0
    for batch in engine.teacher.batches:
        tensors = [batch.states, batch.logits, *(getattr(s, "hidden", None) for s in batch.inputs)]
        total += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        total += sum(memo.bytes for memo in batch.memos if memo is not None)
    return total
