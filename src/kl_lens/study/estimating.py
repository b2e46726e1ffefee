"""What a run takes, stage by stage: `run --estimate`, and the forecast of `run`.

A few blocks and a matrix product are timed; everything else is counted, in the units of the sweep's progress. Nothing
is gathered, and no text is opened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import psutil
import torch

from kl_lens.base.environment import processors
from kl_lens.base.errors import KLLensError
from kl_lens.evaluation.scoring import COMPARED_WINDOWS
from kl_lens.measuring import screening
from kl_lens.measuring.engines import DEFAULT_MEMORY, memory_on
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.sweep import quantizing_work, work_of
from kl_lens.measuring.teacher import batch_tokens, window_bytes
from kl_lens.model import LoadedModel, States
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.study.staging import MEASURED, OF_LOSS, expected_work

BLOCKS = 3  # that are timed
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


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few: whatever disturbs a repeat makes it slower, never faster."""
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


def _pace(model: LoadedModel, windows: int, length: int) -> float:
    """Seconds per token and parameter of the blocks."""
    chain, anatomy = model.chain, model.anatomy
    together = max(1, batch_tokens(chain, memory_on(chain.device, DEFAULT_MEMORY)) // length)
    rows = together if chain.device.type == "cuda" else min(windows, together)
    ids = torch.arange(length) % 1000 % anatomy.component(anatomy.embedding).shape[-2]
    calls, timed = chain.calls(ids.repeat(rows, 1)), min(BLOCKS, len(chain))
    with chain.kernels():
        seconds = _seconds(partial(chain.run, States(calls.hidden), calls, 0, timed), chain.device)
    parameters = sum(c.parameters for c in anatomy.candidates if c.block is not None and c.block < timed)
    return seconds / (rows * length) / max(1, parameters)


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
    anatomy, targets = model.anatomy, len(every)
    window = length * _pace(model, windows, length)  # seconds of one parameter on one window
    weights = sum(c.parameters for c in anatomy.components)
    head = anatomy.component(anatomy.head)
    inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)
    left, right = torch.ones(256, 2048), torch.ones(2048, 2048)
    product = _seconds(lambda: torch.mm(left, right), left.device)
    in_runtime = weights * product / (RUNTIME * left.numel() * len(right))  # seconds per token, on the CPU
    decoding = DECODING * in_runtime

    def text(windows: float) -> float:
        """The whole model on so many windows."""
        return windows * window * (inside + 2 * head.parameters)

    def export(target: str, files: int, bytes_per_weight: float) -> StageCost:
        size = files * bytes_per_weight * weights
        return StageCost("export", target, files * FILE + size / WRITING / processors(), int(size))

    def evaluate(files: int) -> StageCost:
        """Files in their runtimes and, on the first windows, in PyTorch."""
        runtimes = files * (FILE + judged * length * in_runtime)
        return StageCost("evaluate", None, runtimes + text(judged + files * min(COMPARED_WINDOWS, judged)))

    def measure(target: str, candidates: Sequence[Candidate]) -> StageCost:
        work = sum(work_of(model, c) * windows + quantizing_work(c, length) for c in candidates)
        seconds, count = text(windows + 4), float(len(candidates))  # the original; the noise floor
        if staged and screening.is_worth_it(candidates, with_a_limit=True):
            work = expected_work(model, screening.Screen(candidates), windows, length)
            seconds += text((1 + len(OF_LOSS)) * held_out / 2)  # the original and whole plans
            count = min(count, MEASURED * len({c.component.name for c in candidates}))
        made = sum(c.recipe.grid.bytes(c.component.shape) for c in candidates if c.recipe.quantizer.learns)
        disk = int(count / len(candidates) * made + count * windows * length * 5)
        return StageCost("measure", target, seconds + window * work, disk)

    stages = [*(export(target, 1, 2.0) for target in every), evaluate(targets)]
    learnt = {c.component.name: c.component.shape for each in every.values() for c in each}.values()
    if any(c.recipe.quantizer.learns for each in every.values() for c in each):
        moments = sum(shape[-1] ** 2 for shape in learnt) / 2  # half of each matrix, besides the products
        kept = sum(math.prod(shape[:-2]) * shape[-1] ** 2 for shape in learnt)  # of float32, one half
        stages.append(
            StageCost("calibrate", None, TEXT + LEARNT_WINDOWS * window * (inside + moments), 2 * kept)
        )
    for target, candidates in every.items():
        stages += [measure(target, candidates), StageCost("plan", target, text(PLANS * held_out / 2))]
    stages += [*(export(target, FILES - 1, 0.8) for target in every), evaluate((FILES - 1) * targets)]
    if "evaluate" not in without:
        stages.append(StageCost("generate", None, SAMPLES + targets * (FILE + 2 * 32 * decoding)))
    each = TIMED_FILE + (repeats + 1) * (160 * in_runtime + 32 * decoding)
    stages.append(StageCost("benchmark", None, MACHINE + FILES * targets * each))
    stages.append(StageCost("report", None, 2.0))
    states = max(windows, held_out // 2) * window_bytes(model.chain, length, head.shape[-1], head.shape[-2])
    largest = max(c.parameters for c in anatomy.candidates)
    memory = psutil.Process().memory_info().rss + min(DEFAULT_MEMORY, states) + 12 * largest
    return JobEstimate(tuple(stage for stage in stages if stage.verb not in without), memory, windows)
