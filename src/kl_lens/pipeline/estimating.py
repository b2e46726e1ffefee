"""`run --estimate`: what the whole job takes, stage by stage.

A few blocks, the head and some rows in every recipe are timed; everything else is counted. Nothing is gathered, and the
model's text is not opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from kl_lens.checkpoints import LoadedModel, States
from kl_lens.pipeline.staging import MEASURED
from kl_lens.quantizers import InputStatistics
from kl_lens.recipes import Recipe
from kl_lens.sensitivity import screening
from kl_lens.sensitivity.engines import DEFAULT_MEMORY
from kl_lens.sensitivity.perturbation import Candidate, find_candidates
from kl_lens.sensitivity.sweep import work_of
from kl_lens.sensitivity.teacher import window_bytes

BLOCKS, ROWS = 4, 128  # that are timed
LEARNT_WINDOWS = 32  # of `calibrate`
COMPARED = 1.5  # logits and their comparison, of logits alone
FILES = 6  # per target: FP16, four stock recipes, the plan
PLANS = 14  # whole plans that `plan` measures, on half of the held-out text each
WRITING = 6e7  # bytes of weights per second: quantized, packed, written, read back and compared
FILE = 2.0  # seconds per file besides its weights: header, tokenizer, opening it in the runtime
DECODING = 8  # generating a token takes as long as reading so many


@dataclass(frozen=True)
class StageCost:
    verb: str
    target: str | None
    seconds: float
    disk: int = 0


@dataclass(frozen=True)
class JobEstimate:
    stages: tuple[StageCost, ...]  # as they come
    memory: int
    windows: int

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def disk(self) -> int:
        return sum(stage.disk for stage in self.stages)


@dataclass(frozen=True)
class JobRates:
    """Seconds, as timed here."""

    blocks: float  # per token, all blocks
    head: float  # per token
    rows: Mapping[tuple[Recipe, int], float]  # (recipe, columns) → per row

    def quantizing(self, candidate: Candidate, rows: int | None = None) -> float:
        *several, height, columns = candidate.component.shape
        matrices = several[0] if several else 1
        return matrices * min(height, rows or height) * self.rows[candidate.recipe, columns]


def timed_rates(model: LoadedModel, candidates: Sequence[Candidate], length: int) -> JobRates:
    """Takes a few seconds."""
    chain, anatomy = model.chain, model.anatomy
    ids = (torch.arange(length) % 1000 % anatomy.component(anatomy.embedding).shape[-2])[None]
    calls = chain.calls(ids)
    states, seconds, parameters = States(calls.hidden), 0.0, 0
    with chain.kernels():
        for index in range(min(BLOCKS, len(chain))):
            after = chain.run(states, calls, index, index + 1)  # compiles kernels, and enters the next block
            seconds += _seconds(model, lambda i=index, s=states: chain.run(s, calls, i, i + 1))  # type: ignore[misc]
            parameters += sum(c.parameters for c in anatomy.candidates if c.block == index)
            states = after
        rows = calls.hidden.flatten(0, -2)[:ROWS]
        head = _seconds(model, lambda: chain.logits(rows)) / len(rows)
    every = sum(c.parameters for c in anatomy.candidates if c.block is not None)
    shapes = {(c.recipe, c.component.shape[-1]) for c in candidates}
    return JobRates(
        blocks=seconds / length * every / max(1, parameters),
        head=head,
        rows={(recipe, columns): _row_seconds(model, recipe, columns) for recipe, columns in shapes},
    )


def _row_seconds(model: LoadedModel, recipe: Recipe, columns: int) -> float:
    """Of random rows: the time does not depend on the values."""
    weight = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0)).to(model.chain.device)
    given = None
    if recipe.quantizer.learns:
        moments = torch.eye(columns, device=weight.device) + 0.1
        given = InputStatistics(moments, (LEARNT_WINDOWS * 512,))
    quantize = recipe.quantizer.quantize
    quantize(weight[:8], recipe.grid, "rows", given)  # compiles kernels, and factorises the moments
    return _seconds(model, lambda: quantize(weight, recipe.grid, "rows", given)) / ROWS


def _seconds(model: LoadedModel, work: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if model.chain.device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def job_estimate(
    model: LoadedModel,
    menus: Mapping[str, Sequence[str]],
    *,
    windows: int,
    length: int,
    held_out: int,
    judged: int,
    repeats: int,
    exhaustive: bool,
    without: Sequence[str],
) -> JobEstimate:
    """`menus`: target → its recipes. `held_out`, `judged`: windows to plan and to evaluate with."""
    anatomy = model.anatomy
    every = {
        target: find_candidates(anatomy, [Recipe.parse(r) for r in menu])[0] for target, menu in menus.items()
    }
    nearest = [Candidate(c.component, Recipe(c.recipe.grid.name)) for cs in every.values() for c in cs]
    rates = timed_rates(model, [*(c for cs in every.values() for c in cs), *nearest], length)
    whole = rates.blocks + COMPARED * rates.head  # per token
    parts = max(work_of(model, c) for c in nearest)
    weights = sum(c.parameters for c in anatomy.components)
    inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)
    moments = {c.component.name: c.component.shape[-1] ** 2 for c in nearest}

    def measuring(candidate: Candidate, count: int) -> float:
        """On so many windows; the blocks before its own do not run."""
        return count * length * whole * work_of(model, candidate) / parts

    def measure(target: str) -> StageCost:
        candidates = every[target]
        seconds, measured = windows * length * whole * 3, float(len(candidates))
        sizes = sum(c.recipe.grid.bytes(c.component.shape) for c in candidates)
        if screening.is_worth_it(candidates, with_a_limit=True) and not exhaustive:
            screen = screening.Screen(candidates)
            few = max(1, windows // screening.PART)
            seconds += sum(measuring(c, few) + rates.quantizing(c) for c in screen.first)
            seconds += sum(rates.quantizing(c, screening.ROWS) for c in screen.needed)
            measured = min(measured, MEASURED * len({c.component.name for c in candidates}))
        share = measured / len(candidates)
        seconds += share * sum(measuring(c, windows) + rates.quantizing(c) for c in candidates)
        return StageCost("measure", target, seconds, int(share * sizes + measured * windows * length * 5))

    def export(target: str, files: int, bytes_per_weight: float) -> StageCost:
        size = files * bytes_per_weight * weights
        return StageCost("export", target, files * FILE + size / WRITING, int(size))

    stages = [export(target, 1, 2.0) for target in every]
    if any(c.recipe.quantizer.learns for cs in every.values() for c in cs):
        grown = 1 + sum(moments.values()) / max(1, inside)  # the moments of every input besides the products
        seconds = LEARNT_WINDOWS * length * rates.blocks * grown
        stages.append(StageCost("calibrate", None, seconds, 4 * sum(moments.values())))
    for target in every:
        stages += [measure(target), StageCost("plan", target, PLANS * held_out / 2 * length * whole)]
    stages += [export(target, FILES - 1, 0.8) for target in every]
    files = FILES * len(every)
    stages.append(StageCost("evaluate", None, (files + 1) * judged * length * whole))
    turns = files * (repeats + 1)
    stages.append(StageCost("benchmark", None, turns * (160 + 2 * 32 * DECODING) * whole))
    stages.append(StageCost("report", None, 3.0))
    stages = [stage for stage in stages if stage.verb not in without]
    head = anatomy.component(anatomy.head)
    window = window_bytes(model.chain, length, head.shape[-1], head.shape[-2])
    states = min(DEFAULT_MEMORY, max(windows, held_out) * window)
    largest = max(c.parameters for c in anatomy.candidates)
    memory = psutil.Process().memory_info().rss + states + 12 * largest
    return JobEstimate(tuple(stages), memory, windows)
