"""What the stages of `run` should take. A few blocks and a matrix product are timed; everything else is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from kl_lens.base.environment import processors
from kl_lens.judging.scoring import COMPARED_WINDOWS
from kl_lens.measuring import screening
from kl_lens.measuring.engines import DEFAULT_MEMORY, memory_on
from kl_lens.measuring.perturbation import Candidate, find_candidates
from kl_lens.measuring.sweep import quantizing_work, work_of
from kl_lens.measuring.teacher import batch_tokens, window_bytes
from kl_lens.model import LoadedModel, States
from kl_lens.profiling.machine import LoadMeter
from kl_lens.study import measure
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe

BLOCKS = 3  # that are timed
ENOUGH = 0.2
REPEATS = 3  # seconds and repeats of a timing: until one of them
LEARNT_WINDOWS = 32  # of `calibrate`
FILES = 6  # per target: FP16, four stock recipes, the plan
DECIDING = 3  # of them judged by their runtime
TIMED = 5
PLANS = 16  # whole plans that `plan` measures, on half of the held-out text each
# What cannot be timed without files, in seconds. benchmarks/forecast.py shows how well it fits.
WRITING = 3e7  # bytes per second and processor: quantized, packed, written, read back and compared
FILE = 1.0  # header, tokenizer, opening it in the runtime
TEXT = 5.0  # to read and tokenize a training text
MACHINE = 8.0  # the machine's limits, and fresh processes
SAMPLES = 2.0  # text by the original
COMPILING = (
    20.0  # kernels, the first time: 126 s in a fresh clone, 106 s in one that had them
)
DECODING = 6  # generating a token takes as long as reading so many
RUNTIME = 0.25  # of the speed of products in PyTorch: 0.14 llama.cpp without dotprod, 0.34 OpenVINO, 0.3 a 130m model


def estimate(
    model: LoadedModel,
    menus: Mapping[str, Sequence[str]],
    *,
    windows: int,
    length: int,
    held_out: int,
    judged: int,
    repeats: int,
    exhaustive: bool,
    opened: float,
) -> JobEstimate:
    """Of all stages, without the paper's, `rank` and tasks. `menus`: of each target. `opened`: seconds so far."""
    anatomy = model.anatomy
    load = LoadMeter()
    of_block = _seconds_of_blocks(model, windows, length)
    left = torch.ones(256, 2048)
    right = torch.ones(2048, 2048)
    product = _shortest(lambda: torch.mm(left, right), left.device)
    busy = min(0.9, sum(load.read().values()))
    alone = 1 - busy  # of these seconds, if nothing else used the processors
    window = length * of_block * (1.0 if model.device.type == "cuda" else alone)
    weights = sum(c.parameters for c in anatomy.components)
    products = left.numel() * len(right)
    in_runtime = weights * product * alone / (RUNTIME * products)  # of a token
    head = anatomy.component(anatomy.head)
    inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)

    def text(windows: float) -> float:
        """The whole model on so many windows."""
        return windows * window * (inside + 2 * head.parameters)

    def files(count: int, read: float = 0, written: float = 0) -> float:
        """Files opened in their runtimes, and so many tokens with each."""
        return count * (FILE + (read + DECODING * written) * in_runtime)

    def exporting(target: str, count: int, bytes_per_weight: float) -> StageCost:
        size = count * bytes_per_weight * weights
        seconds = files(count) + size / WRITING / processors()
        return StageCost("export", target, seconds, int(size))

    def measuring(target: str, candidates: Sequence[Candidate]) -> StageCost:
        work = [
            work_of(model, c) * windows + quantizing_work(c, length) for c in candidates
        ]
        total = sum(work)
        passes = windows + 4.0  # the original; the noise floor
        share = 1.0  # of the candidates that are measured
        if not exhaustive and screening.is_worth_it(candidates, with_a_limit=True):
            screen = screening.Screen(candidates)
            total = measure.expected_work(model, screen, windows, length)
            passes += (1 + len(measure.OF_LOSS)) * held_out / 2  # whole plans
            names = {c.component.name for c in candidates}
            share = min(1.0, measure.MEASURED * len(names) / len(candidates))
        made = sum(
            c.recipe.grid.bytes(c.component.shape)
            for c in candidates
            if c.recipe.quantizer.learns
        )
        disk = share * (made + len(candidates) * windows * length * 5)
        seconds = text(passes) + window * total
        if target == first:
            seconds += compiling
        return StageCost("measure", target, seconds, int(disk))

    candidates = {
        target: find_candidates(anatomy, [*map(Recipe.parse, menu)])[0]
        for target, menu in menus.items()
    }
    targets = len(menus)
    first = next(iter(menus))
    compiling = 0.0 if _has_kernels() else COMPILING
    stages = [StageCost("inspect", None, opened)]
    stages += [exporting(target, 1, 2.0) for target in menus]
    first_look = files(targets, length) + text(1 + targets)
    stages.append(StageCost("evaluate", None, first_look))
    every = [c for some in candidates.values() for c in some]
    if any(c.recipe.quantizer.learns for c in every):
        shapes = {c.component.name: c.component.shape for c in every}.values()
        moments = sum(shape[-1] ** 2 for shape in shapes) / 2  # besides the products
        stored = sum(math.prod(shape[:-2]) * shape[-1] ** 2 for shape in shapes)
        seconds = TEXT + LEARNT_WINDOWS * window * (inside + moments)
        stages.append(StageCost("calibrate", None, seconds, 2 * stored))
    for target, some in candidates.items():
        stages.append(measuring(target, some))
        stages.append(StageCost("plan", target, text(PLANS * held_out / 2)))
    stages += [exporting(target, FILES - 1, 0.8) for target in menus]
    deciding = DECIDING * targets
    in_torch = judged + deciding * min(COMPARED_WINDOWS, judged)
    in_torch += (FILES - DECIDING) * targets * judged
    judging = files(deciding, judged * length) + text(in_torch)
    stages.append(StageCost("evaluate", None, judging))
    samples = SAMPLES + files(targets, written=64)
    stages.append(StageCost("generate", None, samples))
    turns = repeats + 1
    timing = MACHINE + files(TIMED * targets, turns * 160, turns * 32)
    stages.append(StageCost("benchmark", None, timing))
    stages.append(StageCost("report", None, 2.0))
    states = max(windows, held_out // 2) * window_bytes(
        model.chain, length, head.shape[-1], head.shape[-2]
    )
    largest = max(c.parameters for c in anatomy.candidates)
    measured = min(DEFAULT_MEMORY, states) + 12 * largest
    written = max(get_target(target).writing_bytes for target in menus) * weights
    memory = psutil.Process().memory_info().rss + max(measured, int(written))
    return JobEstimate(tuple(stages), memory, windows, compiling, busy)


def _has_kernels() -> bool:
    """Whether quantizing was compiled here before; numba keeps what it compiles beside the code if it can."""
    return any((Path(__file__).parents[1] / "weights").rglob("*.nbi"))


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest repeat: whatever disturbs one makes it slower, never faster."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[float] = []
    work()  # compiles kernels
    while len(times) < REPEATS and sum(times) < ENOUGH:
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)


def _seconds_of_blocks(model: LoadedModel, windows: int, length: int) -> float:
    """Per token and parameter."""
    chain = model.chain
    anatomy = model.anatomy
    memory = memory_on(chain.device, DEFAULT_MEMORY)
    rows = max(1, batch_tokens(chain, memory) // length)
    if chain.device.type != "cuda":
        rows = min(windows, rows)
    ids = torch.arange(length) % 1000 % anatomy.component(anatomy.embedding).shape[-2]
    calls = chain.calls(ids.repeat(rows, 1))
    timed = min(BLOCKS, len(chain))
    work = partial(chain.run, States(calls.hidden), calls, 0, timed)
    with chain.kernels():
        seconds = _shortest(work, chain.device)
    parameters = sum(
        c.parameters
        for c in anatomy.candidates
        if c.block is not None and c.block < timed
    )
    return seconds / (rows * length) / max(1, parameters)
