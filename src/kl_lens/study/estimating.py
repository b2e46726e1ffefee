"""What a job takes, stage by stage: `run --estimate`, `measure --estimate`, and the forecast of `run`.

A few blocks, the head, comparing its logits, a matrix product, and some rows in every recipe are timed; everything else
is counted. Nothing is gathered, and no text is opened.

On a CPU, timings are of this thread's own processor time, which is about what the work takes on an idle machine. How
many times longer it takes now is one number, from all timings together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
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
from kl_lens.study.costs import JobEstimate, StageCost
from kl_lens.study.staging import MEASURED, OF_LOSS
from kl_lens.weights.quantizers import InputStatistics
from kl_lens.weights.recipes import Recipe

BLOCKS = 3  # that are timed
ROWS = 64  # timed at least
ROWS_WORK = 2**26  # rows × columns²: more rows are timed of narrow weights
GPU_ROWS = 1 << 14  # a GPU takes as long for few rows as for many
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


class Estimator:
    """What stages take that measure these candidates (target → its own) on so many windows of this length."""

    def __init__(
        self,
        model: LoadedModel,
        every: Mapping[str | None, Sequence[Candidate]],
        *,
        windows: int,
        length: int,
        held_out: int,
        staged: bool,
    ) -> None:
        if model.residency is not None or not model.task.generates:
            raise KLLensError("--estimate needs a language model that fits into memory")
        self.model, self.every, self.windows, self.length = model, every, windows, length
        self.held_out, self.staged = held_out, staged
        self._device = model.chain.device
        self._rows: dict[tuple[Recipe, int, int], float] = {}  # seconds, as timed
        self._inputs: dict[int, InputStatistics] = {}
        self._waited = self._worked = 0.0  # seconds of all timings, by the clock and of this thread
        self._time_model()

    # -- timing -------------------------------------------------------------------------------------------

    def _time_model(self) -> None:
        """Seconds per token of all blocks and of the head, and of the whole model with a comparison."""
        chain, anatomy = self.model.chain, self.model.anatomy
        together = max(1, batch_tokens(chain, memory_on(self._device, DEFAULT_MEMORY)) // self.length)
        if self._device.type == "cpu":
            together = min(self.windows, together)
        vocabulary = anatomy.component(anatomy.embedding).shape[-2]
        ids = (torch.arange(self.length) % 1000 % vocabulary).repeat(together, 1)
        calls = chain.calls(ids)
        states, seconds, parameters = States(calls.hidden), 0.0, 0
        with chain.kernels():
            for index in range(min(BLOCKS, len(chain))):
                # Compiles kernels, and enters the next block.
                after = chain.run(states, calls, index, index + 1)
                seconds += self._seconds(partial(chain.run, states, calls, index, index + 1))
                parameters += sum(c.parameters for c in anatomy.candidates if c.block == index)
                states = after
            rows = calls.hidden.flatten(0, -2)[: GPU_ROWS // 4 if self._device.type == "cuda" else 2 * ROWS]
            logits = chain.logits(rows)
            teacher = TeacherRows.of(logits, logits.argmax(-1))
            compare(teacher, logits)
            self.head = self._seconds(lambda: compare(teacher, chain.logits(rows))) / len(rows)
        inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)
        self.blocks = seconds / ids.numel() * inside / max(1, parameters)

    def _quantizing(self, candidate: Candidate, rows: int | None = None) -> float:
        """Seconds for a candidate's weight, or so many of its rows; of random values, which take as long."""
        *several, height, columns = candidate.component.shape
        wanted = min(height, rows or height)
        most = GPU_ROWS if self._device.type == "cuda" else max(ROWS, ROWS_WORK // columns**2)
        timed = min(wanted, most)
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

    def _seconds(self, work: Callable[[], Any]) -> float:
        """The shortest of a few: whatever disturbs a repeat makes it slower, never faster."""
        wait = torch.cuda.synchronize if self._device.type == "cuda" else lambda: None
        clock = time.thread_time if self._device.type == "cpu" else time.perf_counter
        times: list[float] = []
        wait()
        while len(times) < REPEATS and sum(times) < ENOUGH:
            begin, start = time.perf_counter(), clock()
            work()
            wait()
            times.append(clock() - start)
            self._waited, self._worked = self._waited + time.perf_counter() - begin, self._worked + times[-1]
        return min(times)

    @cached_property
    def _in_runtime(self) -> float:
        """Seconds per token in a runtime, which computes on the CPU."""
        left, right = torch.ones(256, 2048), torch.ones(2048, 2048)
        torch.mm(left, right)
        rate = left.numel() * len(right) / self._seconds(lambda: torch.mm(left, right))
        return sum(c.parameters for c in self.model.anatomy.components) / (RUNTIME * rate)

    # -- counting -----------------------------------------------------------------------------------------

    @cached_property
    def _all(self) -> list[Candidate]:
        return [candidate for candidates in self.every.values() for candidate in candidates]

    def text(self, windows: float) -> float:
        """Seconds of the whole model on so many windows."""
        return windows * self.length * (self.blocks + self.head)

    def calibrate(self) -> list[StageCost]:
        """Nothing if no recipe learns."""
        if not any(c.recipe.quantizer.learns for c in self._all):
            return []
        moments = sum({c.component.name: c.component.shape[-1] ** 2 for c in self._all}.values())
        inside = sum(c.parameters for c in self.model.anatomy.candidates if c.block is not None)
        grown = 1 + moments / 2 / max(1, inside)  # half of the moments of every input besides the products
        seconds = TEXT + LEARNT_WINDOWS * self.length * self.blocks * grown
        kept = {
            c.component.name: math.prod(c.component.shape[:-2]) * c.component.shape[-1] ** 2
            for c in self._all
        }
        return [StageCost("calibrate", None, seconds, 2 * sum(kept.values()))]  # of float32, one half

    def measure(self, target: str | None) -> StageCost:
        candidates = self.every[target]
        count = float(len(candidates))
        seconds = self.text(self.windows + 4)  # the original; the noise floor: two windows, twice
        if self.staged and screening.is_worth_it(candidates, with_a_limit=True):
            screen = screening.Screen(candidates)
            few = max(1, self.windows // screening.PART)
            seconds += sum(self._sweeping(c, few) + self._quantizing(c) for c in screen.first)
            seconds += sum(self._quantizing(c, screening.ROWS) for c in screen.needed)
            seconds += self.text((1 + len(OF_LOSS)) * self.held_out / 2)  # the original and whole plans
            count = min(count, MEASURED * len({c.component.name for c in candidates}))
        share = count / len(candidates)
        seconds += share * sum(self._sweeping(c, self.windows) + self._quantizing(c) for c in candidates)
        made = sum(c.recipe.grid.bytes(c.component.shape) for c in candidates if c.recipe.quantizer.learns)
        return StageCost(
            "measure", target, seconds, int(share * made + count * self.windows * self.length * 5)
        )

    def _sweeping(self, candidate: Candidate, windows: int) -> float:
        """On so many windows; the blocks before its own do not run."""
        share = blocks_run(self.model, candidate) / max(1, self.model.anatomy.blocks)
        return windows * self.length * (share * self.blocks + self.head)

    def export(self, target: str | None, files: int, bytes_per_weight: float) -> StageCost:
        size = files * bytes_per_weight * sum(c.parameters for c in self.model.anatomy.components)
        return StageCost("export", target, files * FILE + size / WRITING / processors(), int(size))

    def evaluate(self, files: int, judged: int) -> StageCost:
        """Files in their runtimes and, on the first windows, in PyTorch."""
        runtimes = files * (FILE + judged * self.length * self._in_runtime)
        return StageCost(
            "evaluate", None, runtimes + self.text(judged + files * min(agreement.WINDOWS, judged))
        )

    def run(self, *, judged: int, repeats: int, without: Sequence[str]) -> JobEstimate:
        """All stages; `judged`: windows to evaluate with."""
        targets, decoding = len(self.every), DECODING * self._in_runtime
        stages = [self.export(target, 1, 2.0) for target in self.every]
        stages += [self.evaluate(targets, judged), *self.calibrate()]
        for target in self.every:
            stages += [self.measure(target), StageCost("plan", target, self.text(PLANS * self.held_out / 2))]
        stages += [self.export(target, FILES - 1, 0.8) for target in self.every]
        stages.append(self.evaluate((FILES - 1) * targets, judged))
        if "evaluate" not in without:
            stages.append(StageCost("generate", None, SAMPLES + targets * (FILE + 2 * 32 * decoding)))
        each = TIMED_FILE + (repeats + 1) * (160 * self._in_runtime + 32 * decoding)
        stages.append(StageCost("benchmark", None, MACHINE + FILES * targets * each))
        stages.append(StageCost("report", None, 2.0))
        return self.of(stage for stage in stages if stage.verb not in without)

    def of(self, stages: Iterable[StageCost]) -> JobEstimate:
        """These stages, and the most memory that any of them takes."""
        anatomy = self.model.anatomy
        head = anatomy.component(anatomy.head)
        window = window_bytes(self.model.chain, self.length, head.shape[-1], head.shape[-2])
        states = min(DEFAULT_MEMORY, max(self.windows, self.held_out // 2) * window)
        largest = max(c.parameters for c in anatomy.candidates)
        memory = psutil.Process().memory_info().rss + states + 12 * largest
        load = max(1.0, self._waited / self._worked)
        slowed = tuple(replace(stage, seconds=load * stage.seconds) for stage in stages)
        return JobEstimate(slowed, memory, self.windows, load)
