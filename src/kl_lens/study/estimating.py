"""What a run takes, stage by stage: `run --estimate`, and the forecast of `run`.

A few blocks, the head, comparing its logits, a matrix product, and some rows in every recipe are timed; everything else
is counted. Nothing is gathered, and no text is opened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import torch

from kl_lens.base.environment import processors
from kl_lens.base.errors import KLLensError
from kl_lens.evaluation import agreement
from kl_lens.measuring import screening
from kl_lens.measuring.engines import DEFAULT_MEMORY, memory_on
from kl_lens.measuring.metrics import TeacherRows, compare
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.sweep import blocks_run
from kl_lens.measuring.teacher import batch_tokens, window_bytes
from kl_lens.model import LoadedModel, States
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.study.staging import MEASURED, OF_LOSS
from kl_lens.weights.quantizers import InputStatistics

BLOCKS = 3  # that are timed
ROWS, GPU_ROWS = 64, 1 << 14  # timed at least; a GPU takes as long for few rows as for many
ROWS_WORK = 2**26  # rows × columns²: more rows are timed of narrow weights
ENOUGH, REPEATS = 0.2, 3  # seconds and repeats of a timing: until one of them
LEARNT_WINDOWS = 32  # of `calibrate`
FILES = 6  # per target: FP16, four stock recipes, the plan
PLANS = 16  # whole plans that `plan` measures, on half of the held-out text each
# What cannot be timed without files. benchmarks/forecast.py shows how well it fits; two ARM cores, reference:mamba:
WRITING = 3e7  # bytes of weights per second and processor: quantized, packed, written, read back and compared
FILE = 1.0  # seconds per file besides its weights: header, tokenizer, opening it in the runtime
TEXT = 5.0  # seconds to read and tokenize a training text
TIMED_FILE = 2.0  # seconds to load a file in a fresh process, and four times in this one
MACHINE = 3.0  # seconds to time the machine's limits
SAMPLES = 2.0  # seconds for text samples by the original
DECODING = 6  # generating a token takes as long as reading so many
RUNTIME = 0.25  # of the speed of products in PyTorch: 0.14 llama.cpp without dotprod, 0.34 OpenVINO, 0.3 a 130m model


class Timings:
    """Seconds of a model's parts; the shortest of a few: whatever disturbs a repeat makes it slower, never faster."""

    def __init__(self, model: LoadedModel, windows: int, length: int) -> None:
        self.model, self.length, self._device = model, length, model.chain.device
        chain, anatomy, gpu = model.chain, model.anatomy, model.chain.device.type == "cuda"
        together = max(1, batch_tokens(chain, memory_on(self._device, DEFAULT_MEMORY)) // length)
        vocabulary = anatomy.component(anatomy.embedding).shape[-2]
        ids = (torch.arange(length) % 1000 % vocabulary).repeat(
            together if gpu else min(windows, together), 1
        )
        calls = chain.calls(ids)
        states, seconds, parameters = States(calls.hidden), 0.0, 0
        with chain.kernels():
            for index in range(min(BLOCKS, len(chain))):
                # Compiles kernels, and enters the next block.
                after = chain.run(states, calls, index, index + 1)
                seconds += self._seconds(partial(chain.run, states, calls, index, index + 1))
                parameters += sum(c.parameters for c in anatomy.candidates if c.block == index)
                states = after
            rows = calls.hidden.flatten(0, -2)[: GPU_ROWS // 4 if gpu else 2 * ROWS]
            logits = chain.logits(rows)
            teacher = TeacherRows.of(logits, logits.argmax(-1))
            compare(teacher, logits)
            self.head = self._seconds(lambda: compare(teacher, chain.logits(rows))) / len(rows)  # per token
        self.inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)
        self.blocks = seconds / ids.numel() * self.inside / max(1, parameters)  # per token
        left, right = torch.ones(256, 2048), torch.ones(2048, 2048)
        torch.mm(left, right)
        rate = left.numel() * len(right) / self._seconds(lambda: torch.mm(left, right))
        self.weights = sum(c.parameters for c in anatomy.components)
        self.in_runtime = self.weights / (RUNTIME * rate)  # per token, on the CPU
        self._rows: dict[tuple[object, ...], float] = {}
        self._inputs: dict[int, InputStatistics] = {}

    def _seconds(self, work: Callable[[], Any]) -> float:
        wait = torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < ENOUGH:
            wait()
            begin = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - begin)
        return min(times)

    def text(self, windows: float) -> float:
        """The whole model on so many windows."""
        return windows * self.length * (self.blocks + self.head)

    def sweeping(self, candidate: Candidate, windows: int) -> float:
        """On so many windows; the blocks before its own do not run."""
        share = blocks_run(self.model, candidate) / max(1, self.model.anatomy.blocks)
        return windows * self.length * (share * self.blocks + self.head)

    def quantizing(self, candidate: Candidate, rows: int | None = None) -> float:
        """A candidate's weight, or so many of its rows; of random values, which take as long."""
        *several, height, columns = candidate.component.shape
        wanted = min(height, rows or height)
        timed = min(wanted, GPU_ROWS if self._device.type == "cuda" else max(ROWS, ROWS_WORK // columns**2))
        if (key := (candidate.recipe, timed, columns)) not in self._rows:
            random = torch.Generator(self._device).manual_seed(0)
            weight = torch.randn(timed, columns, generator=random, device=self._device)
            quantizer, grid, given = candidate.recipe.quantizer, candidate.recipe.grid, None
            if quantizer.learns:
                if columns not in self._inputs:  # the same for all recipes: quantizers factorise them once
                    moments = torch.eye(columns, device=self._device) + 0.1
                    self._inputs[columns] = InputStatistics(moments, (LEARNT_WINDOWS * self.length,))
                given = self._inputs[columns]
            # Compiles kernels (for a GPU, others if rows do not divide by 16), and factorises the moments.
            quantizer.quantize(weight[:16], grid, "rows", given)
            self._rows[key] = self._seconds(lambda: quantizer.quantize(weight, grid, "rows", given))
        return (several[0] if several else 1) * wanted / timed * self._rows[key]


def estimate(
    model: LoadedModel,
    every: Mapping[str, Sequence[Candidate]],
    *,
    windows: int,
    length: int,
    held_out: int,
    staged: bool,
    judged: int,
    repeats: int,
    without: Sequence[str],
) -> JobEstimate:
    """All stages of a run: target → the candidates that it measures, on so many windows of this length; `judged`:
    windows to evaluate with."""
    if model.residency is not None or not model.task.generates:
        raise KLLensError("--estimate needs a language model that fits into memory")
    seconds = Timings(model, windows, length)
    targets, decoding = len(every), DECODING * seconds.in_runtime

    def export(target: str, files: int, bytes_per_weight: float) -> StageCost:
        size = files * bytes_per_weight * seconds.weights
        return StageCost("export", target, files * FILE + size / WRITING / processors(), int(size))

    def evaluate(files: int) -> StageCost:
        """Files in their runtimes and, on the first windows, in PyTorch."""
        runtimes = files * (FILE + judged * length * seconds.in_runtime)
        original = seconds.text(judged + files * min(agreement.WINDOWS, judged))
        return StageCost("evaluate", None, runtimes + original)

    stages = [export(target, 1, 2.0) for target in every]
    stages += [evaluate(targets), *_calibrate(seconds, [c for each in every.values() for c in each])]
    for target, candidates in every.items():
        stages.append(_measure(seconds, target, candidates, windows, held_out if staged else None))
        stages.append(StageCost("plan", target, seconds.text(PLANS * held_out / 2)))
    stages += [export(target, FILES - 1, 0.8) for target in every]
    stages.append(evaluate((FILES - 1) * targets))
    if "evaluate" not in without:
        stages.append(StageCost("generate", None, SAMPLES + targets * (FILE + 2 * 32 * decoding)))
    each = TIMED_FILE + (repeats + 1) * (160 * seconds.in_runtime + 32 * decoding)
    stages.append(StageCost("benchmark", None, MACHINE + FILES * targets * each))
    stages.append(StageCost("report", None, 2.0))
    head = model.anatomy.component(model.anatomy.head)
    window = window_bytes(model.chain, length, head.shape[-1], head.shape[-2])
    states = min(DEFAULT_MEMORY, max(windows, held_out // 2) * window)
    largest = max(c.parameters for c in model.anatomy.candidates)
    memory = psutil.Process().memory_info().rss + states + 12 * largest
    return JobEstimate(tuple(stage for stage in stages if stage.verb not in without), memory, windows)


def _calibrate(seconds: Timings, candidates: Sequence[Candidate]) -> list[StageCost]:
    """Nothing if no recipe learns."""
    if not any(c.recipe.quantizer.learns for c in candidates):
        return []
    shapes = {c.component.name: c.component.shape for c in candidates}.values()
    moments = sum(shape[-1] ** 2 for shape in shapes)
    grown = 1 + moments / 2 / max(
        1, seconds.inside
    )  # half of the moments of every input besides the products
    gathering = LEARNT_WINDOWS * seconds.length * seconds.blocks * grown
    kept = sum(math.prod(shape[:-2]) * shape[-1] ** 2 for shape in shapes)
    return [StageCost("calibrate", None, TEXT + gathering, 2 * kept)]  # of float32, one half


def _measure(
    seconds: Timings, target: str, candidates: Sequence[Candidate], windows: int, held_out: int | None
) -> StageCost:
    """`held_out`: windows of a staged search."""
    count = float(len(candidates))
    spent = seconds.text(windows + 4)  # the original; the noise floor: two windows, twice
    if held_out is not None and screening.is_worth_it(candidates, with_a_limit=True):
        screen, few = screening.Screen(candidates), max(1, windows // screening.PART)
        spent += sum(seconds.sweeping(c, few) + seconds.quantizing(c) for c in screen.first)
        spent += sum(seconds.quantizing(c, screening.ROWS) for c in screen.needed)
        spent += seconds.text((1 + len(OF_LOSS)) * held_out / 2)  # the original and whole plans
        count = min(count, MEASURED * len({c.component.name for c in candidates}))
    share = count / len(candidates)
    spent += share * sum(seconds.sweeping(c, windows) + seconds.quantizing(c) for c in candidates)
    made = sum(c.recipe.grid.bytes(c.component.shape) for c in candidates if c.recipe.quantizer.learns)
    return StageCost("measure", target, spent, int(share * made + count * windows * seconds.length * 5))
