"""What the stages of a run should cost. A few blocks and a matrix product are timed; everything else is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import torch

from kl_lens.base.system import DEFAULT_MEMORY, processors
from kl_lens.judging.scoring import COMPARED_WINDOWS
from kl_lens.measuring import screening
from kl_lens.measuring.engines import memory_on
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.sweep import quantizing_work, work_of
from kl_lens.measuring.teacher import batch_tokens, window_bytes
from kl_lens.model import Anatomy, LoadedModel, States
from kl_lens.model.carried import Carried
from kl_lens.profiling.machine import LoadMeter
from kl_lens.run.records import Component
from kl_lens.study import measure
from kl_lens.study.run.settings import RunSettings
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe

HEAD = "head"
OTHER = "other"
WINDOW = 512  # tokens
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
# What is no product takes as long as products of so many times more weights, over the width: a block of 256 took 4.3 to
# 5.3 times as long as its products.
BESIDE_PRODUCTS = 900
DECODING = 6  # generating a token takes as long as reading so many
RUNTIME = 0.25  # of the speed of products in PyTorch: 0.14 llama.cpp without dotprod, 0.34 OpenVINO, 0.3 a 130m model


class Sketch:
    """What costs are counted from where a model's weights are not here: matrices spread evenly over the blocks."""

    device = torch.device("cpu")
    residency = None

    def __init__(self, carried: Carried) -> None:
        outer = (carried.vocabulary, carried.width)
        inner = [shape for shape in carried.matrices if shape != outer]
        inside = [
            Component(f"{i}", f"{i}", str(shape), OTHER, block, shape, math.prod(shape))
            for i, shape in enumerate(inner)
            for block in [i * carried.blocks // len(inner)]
        ]
        head = Component(HEAD, HEAD, HEAD, HEAD, None, outer, math.prod(outer))
        self.anatomy = Anatomy(
            carried.model_type, (*inside, head), carried.blocks, HEAD, HEAD
        )
        self.slower = 1 + BESIDE_PRODUCTS / carried.width
        self.task = SimpleNamespace(window_length=WINDOW)
        state_size = carried.blocks * carried.width
        self.chain = SimpleNamespace(device=self.device, state_size=state_size)


class Cost(NamedTuple):
    seconds: float
    disk: int = 0


class Costs:
    """Of one model on this machine. `opened`: seconds until the model was there."""

    rivals = FILES - 2  # besides FP16 and the plan

    def __init__(
        self,
        settings: RunSettings,
        model: LoadedModel,
        targets: Sequence[str],
        opened: float,
    ) -> None:
        anatomy = model.anatomy
        text = settings.calibration
        self.opened = opened
        self.windows = text.windows or 0
        self._model = model
        self._settings = settings
        self._targets = targets
        self._length = text.window_length or model.task.window_length
        self._held_out = settings.held_out.held_out_windows
        self._judged = settings.evaluation_windows or 0
        self._candidates = {
            target: find_candidates(
                anatomy, [*map(Recipe.parse, settings.menu_of(target, anatomy))]
            )[0]
            for target in targets
        }
        load = LoadMeter()
        rows = torch.ones(256, 2048)
        right = torch.ones(2048, 2048)
        product = _shortest(lambda: torch.mm(rows, right), rows.device)
        products = rows.numel() * len(right)
        if isinstance(model, Sketch):
            of_block = model.slower * product / products
        else:
            of_block = _seconds_of_blocks(model, self.windows, self._length)
        self.busy = min(0.9, sum(load.read().values()))
        alone = 1 - self.busy  # of these seconds, if nothing else used the processors
        share = 1.0 if model.device.type == "cuda" else alone
        self._weights = sum(c.parameters for c in anatomy.components)
        self._inside = sum(
            c.parameters for c in anatomy.candidates if c.block is not None
        )
        self._head = anatomy.component(anatomy.head)
        self._window = self._length * of_block * share  # of a weight
        # Of a token:
        self._in_runtime = self._weights * product * alone / (RUNTIME * products)
        self.compiling = 0.0 if _has_kernels() else COMPILING

    # -- parts of stages ----------------------------------------------------------------------------------------

    def _text(self, windows: float) -> float:
        """The whole model on so many windows."""
        return windows * self._window * (self._inside + 2 * self._head.parameters)

    def _files(self, count: int, read: float = 0, written: float = 0) -> float:
        """Files opened in their runtimes, and so many tokens with each."""
        return count * (FILE + (read + DECODING * written) * self._in_runtime)

    # -- stages -------------------------------------------------------------------------------------------------

    def learning(self) -> Cost | None:
        candidates = [
            c for candidates_of in self._candidates.values() for c in candidates_of
        ]
        if not any(c.recipe.quantizer.learns for c in candidates):
            return None
        shapes = {c.component.name: c.component.shape for c in candidates}.values()
        moments = sum(shape[-1] ** 2 for shape in shapes) / 2  # besides the products
        stored = sum(math.prod(shape[:-2]) * shape[-1] ** 2 for shape in shapes)
        seconds = TEXT + LEARNT_WINDOWS * self._window * (self._inside + moments)
        return Cost(seconds, 2 * stored)

    def measuring(self, target: str) -> Cost:
        model = self._model
        windows = self.windows
        length = self._length
        candidates = self._candidates[target]
        work = [
            work_of(model, c) * windows + quantizing_work(c, length) for c in candidates
        ]
        total = sum(work)
        passes = windows + 4.0  # the original; the noise floor
        share = 1.0  # of the candidates that are measured
        exhaustive = self._settings.exhaustive
        screen = screening.Screen(candidates)
        gradients = self._settings.gradients and screen.gradients_cost_less(
            model, windows
        )
        if not exhaustive and screening.is_worth_it(
            candidates, with_a_limit=True, gradients=gradients
        ):
            total = screen.expected_work(model, windows, length, gradients=gradients)
            passes += (1 + len(measure.OF_LOSS)) * self._held_out / 2  # whole plans
            names = {c.component.name for c in candidates}
            share = min(1.0, screening.MEASURED * len(names) / len(candidates))
        learnt_bytes = sum(
            c.recipe.grid.bytes(c.component.shape)
            for c in candidates
            if c.recipe.quantizer.learns
        )
        disk = share * (learnt_bytes + len(candidates) * windows * length * 5)
        seconds = self._text(passes) + self._window * total
        if target == self._targets[0]:
            seconds += self.compiling
        return Cost(seconds, int(disk))

    def planning(self) -> Cost:
        return Cost(self._text(PLANS * self._held_out / 2))

    def exporting(self, count: int, bytes_per_weight: float) -> Cost:
        size = count * bytes_per_weight * self._weights
        return Cost(self._files(count) + size / WRITING / processors(), int(size))

    def comparing(self) -> Cost:
        targets = len(self._targets)
        return Cost(self._files(targets, self._length) + self._text(1 + targets))

    def judging(self) -> Cost:
        judged = self._judged
        deciding = DECIDING * len(self._targets)
        in_torch = judged + deciding * min(COMPARED_WINDOWS, judged)
        in_torch += (FILES - DECIDING) * len(self._targets) * judged
        in_runtimes = self._files(deciding, judged * self._length)
        return Cost(in_runtimes + self._text(in_torch))

    def writing_samples(self) -> Cost:
        return Cost(SAMPLES + self._files(len(self._targets), written=64))

    def timing(self) -> Cost:
        turns = self._settings.repeats + 1
        files = TIMED * len(self._targets)
        return Cost(MACHINE + self._files(files, turns * 160, turns * 32))

    @property
    def memory(self) -> int:
        head = self._head
        states = max(self.windows, self._held_out // 2) * window_bytes(
            self._model.chain, self._length, head.shape[-1], head.shape[-2]
        )
        largest = max(c.parameters for c in self._model.anatomy.candidates)
        measured = min(self._settings.opening.memory, states) + 12 * largest
        writing = max(get_target(target).writing_bytes for target in self._targets)
        written = int(writing * self._weights)
        return psutil.Process().memory_info().rss + max(measured, written)


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
