"""The sweep: measures every candidate on every window, commits each result, and resumes where it stopped."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from kl_lens.base.errors import RunError
from kl_lens.base.progress import Progress
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring.engines import FastEngine, memory_on
from kl_lens.measuring.perturbation import Candidate, Kernels, first_block, key_of
from kl_lens.measuring.pieces import Done, Found, Job, Layout, Piece, PieceRunner
from kl_lens.measuring.products import FLOAT32, TF32X3
from kl_lens.measuring.teacher import window_bytes
from kl_lens.measuring.workers import Workers
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, KERNELS, Run, role_as
from kl_lens.run.readings import KL, summarise
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import Recipe

# Quantizing one weight takes as long as so many multiplications of a forward pass; measured on two ARM cores.
QUANTIZING = {"gptq": 1.5e4}
LEAST_WINDOWS = 4
MOST_WINDOWS = 64
GPU_WORK = 3.4e15  # multiplications: 32 windows for 2.7 billion parameters


@dataclass(frozen=True)
class SweepResult:
    """How a sweep went; the numbers themselves are in the run."""

    candidates: int
    windows: int
    tokens: int
    measured: int  # candidate × window pairs measured now
    reused: int  # pairs that the run had already
    seconds: float
    precision: str = FLOAT32  # of products


@dataclass(frozen=True)
class Sweep:
    """Measures candidates on windows into a run."""

    model: LoadedModel
    run: Run
    engine: str = FastEngine.name
    memory_budget: int = DEFAULT_MEMORY
    progress: Progress = field(default_factory=Progress)
    deployed: Kernels | None = (
        None  # measure with a runtime's activations, not only quantized weights
    )
    precision: str | None = (
        None  # of products on a GPU; None: the run's, or the fastest that is exact enough
    )
    share: tuple[int, int] | None = None  # (3, 16): only the third of sixteen shares
    workers: Workers | None = None  # that do the measuring in other processes

    def measure(
        self,
        candidates: Sequence[Candidate],
        windows: Windows,
        role: str = CALIBRATION,
        *,
        noise: bool = True,
    ) -> SweepResult:
        """Measures all candidates on all windows, except what the run already holds, and the noise floor."""
        begin = time.perf_counter()
        self.identify(windows, role)
        learnt = self.bind(candidates)
        text, role = role, self._role(role)
        recorded = self.run.identity.get("precision")
        job = Job(
            windows.ids.cpu().numpy().astype(np.int64),
            candidates,
            self.engine,
            self.memory_budget,
            self.deployed,
            self.precision or (None if recorded == FLOAT32 else recorded),
            learnt,
            str(self.run.folder.absolute()),
        )
        costs = [work_of(self.model, candidate, self.engine) for candidate in candidates]
        runner = None
        if self.workers is not None:
            layout = self.workers.begin(job)
            pieces = layout.spread(costs, self.workers.count)
        else:
            runner = PieceRunner(job, job.engine_on(self.model, self.progress.message))
            layout = runner.layout
            pieces = (
                layout.share(costs, *self.share)
                if self.share
                else layout.spread(costs, 1, pieces_each=1)
            )
        if self.deployed is None and layout.engine == FastEngine.name:
            exact = layout.precision in (FLOAT32, TF32X3)  # as accurate as each other
            self.run.identify({"precision": FLOAT32 if exact else layout.precision})
        self.run.store(KERNELS, role, layout.fault or None)
        if self.workers and layout.fault:  # this process has not seen it
            self.model.warn(
                f"{layout.fault}; transformers' own code computes this model instead"
            )
        stored = self.run.measured_windows(role)
        shown = [
            cost + quantizing_work(candidate, windows.length) / len(windows)
            for candidate, cost in zip(candidates, costs, strict=True)
        ]
        reused = self._say_how_much(candidates, pieces, shown, stored)
        missing = [part for piece in pieces if (part := piece.left(candidates, stored))]
        if not noise or self.run.load("noise", role) is not None:
            missing = [replace(piece, noise=False) for piece in missing]
        elif missing and not self.share and not self.workers:
            missing[0] = replace(missing[0], noise=True)
        if self.share or (missing and self.workers):  # results come in any order
            self.run.expect(role, map(key_of, candidates), _dtype(self.model))
        measured = 0
        for results in self._results(job, layout, missing, runner):
            if results.teacher:
                self.run.store_teacher(text, results.teacher)
            if results.noise is not None:
                self.run.store("noise", role, results.noise)
            for index, readings in results.candidates:
                key = key_of(candidates[index])
                known = stored.get(key, ())
                fresh = [reading for reading in readings if reading.window not in known]
                if fresh:
                    measured += len(fresh)
                    self.run.store_samples(
                        role, *key, fresh, results.seconds, _dtype(self.model)
                    )
                    work = shown[index] * len(fresh)
                    self.progress.advanced(work, str(candidates[index]))
        seconds = time.perf_counter() - begin
        size = (len(candidates), len(windows), windows.tokens)
        return SweepResult(*size, measured, reused, seconds, layout.precision)

    def _results(
        self, job: Job, layout: Layout, pieces: list[Piece], runner: PieceRunner | None
    ) -> Iterator[Found]:
        """Done by this process, or by workers and then here what no worker could do."""
        if self.workers and (pieces := (yield from self.workers.do(pieces))):
            runner = PieceRunner(job, job.engine_on(self.model, self.progress.message))
            if runner.layout != layout:
                raise RunError(
                    f"{len(pieces)} pieces of the sweep failed on every worker: {self.workers.reason}; the rest is "
                    "measured; run the same command to try again"
                )
        for piece in pieces:
            assert runner is not None
            self.progress.message(f"original model on {len(piece.windows)} windows")
            yield from runner.do(piece)

    def _say_how_much(
        self,
        candidates: Sequence[Candidate],
        pieces: Sequence[Piece],
        costs: Sequence[float],
        finished_windows: Done,
    ) -> int:
        """Tells the progress display how much is left; returns the pairs that exist already."""
        reused = 0
        finished = 0.0
        total = 0.0
        for piece in pieces:
            for index in chain.from_iterable(piece.groups):
                stored = finished_windows.get(key_of(candidates[index]), set())
                count = len(stored.intersection(piece.windows))
                reused += count
                finished += costs[index] * count
                total += costs[index] * len(piece.windows)
        self.progress.started(total, finished)
        return reused

    def losses(
        self, candidates: Sequence[Candidate], windows: int, role: str = CALIBRATION
    ) -> dict[tuple[str, Recipe], float]:
        """The KL of those that were measured, on the first windows."""
        losses = {}
        for key in map(key_of, candidates):
            if samples := self.run.samples(self._role(role), *key, windows=windows):
                losses[key] = summarise(samples)[KL].value
        return losses

    def lost(self, windows: Windows, role: str = CALIBRATION) -> str:
        """What to say of a text that says little about this model, which the run keeps for the report; else empty."""
        if self.share or not self.model.task.generates:
            return ""
        nats, _ = self.run.teacher_cross_entropy(role)
        words = self.model.task.lost(windows, math.exp(min(nats, 700.0))) or ""
        if words:
            self.run.store("text", role, windows.provenance() | {"lost": words})
        return words

    def _role(self, text: str) -> str:
        """The role of measurements on a text, which includes the target whose activations were used."""
        return role_as(text, self.deployed.name if self.deployed else None)

    def identify(self, windows: Windows, role: str = CALIBRATION) -> None:
        """Records the run's model and text, or refuses others than the recorded ones."""
        self.run.identify(model_identity(self.model))
        about = windows.provenance()
        names = ("source", "split", "order", "length", "seed", "stride")
        identity = {name: about[name] for name in names}
        if windows.bos is not None:
            identity["bos"] = windows.bos
        rows = (row.astype(np.int64).tobytes() for row in windows.ids.cpu().numpy())
        texts = [hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows]
        self.run.identify_text(role, identity, texts)
        self.run.store("text", role, about)

    def bind(self, candidates: Sequence[Candidate]) -> str | None:
        """Records the digest of the statistics that learnt recipes use: results from different ones must not be
        mixed."""
        recipes = (c.recipe for c in candidates if not c.is_state)
        learnt = self.model.weights.learnt_by(recipes)
        if learnt is not None:
            self.run.identify({"statistics": learnt})
        return learnt

    def operations_left(
        self, candidates: Sequence[Candidate], windows: Windows, role: str = CALIBRATION
    ) -> float:
        """Approximate multiplications for everything that the run does not hold yet."""
        stored = self.run.measured_windows(self._role(role))
        work = 0.0
        for candidate in candidates:
            missing = {*range(len(windows))} - stored.get(key_of(candidate), set())
            work += len(missing) * work_of(self.model, candidate, self.engine)
        return 2.0 * windows.length * work


def work_of(
    model: LoadedModel, candidate: Candidate, engine: str = FastEngine.name
) -> float:
    """Relative cost of a candidate: the parameters of the blocks it runs through, and twice the head's."""
    anatomy = model.anatomy
    start = 0
    if engine == FastEngine.name:
        start = max(0, first_block(anatomy, candidate.perturbation))
    inside = sum(c.parameters for c in anatomy.candidates if c.block is not None)
    block = inside / max(1, anatomy.blocks)
    head = anatomy.component(anatomy.head).parameters
    return block * (anatomy.blocks - start) + 2 * head


def quantizing_work(candidate: Candidate, length: int) -> float:
    """Cost of quantizing a candidate's weight, in units of `work_of` per window; for forecasts only."""
    work = QUANTIZING.get(candidate.recipe.method, 0.0)
    return candidate.component.parameters * work / length


def error_work(candidate: Candidate) -> float:
    """Cost of quantizing the few rows that show a candidate's error, in the same units."""
    return 10.0 * candidate.component.shape[-1] ** 2


def windows_by_cost(
    model: LoadedModel, candidates: Sequence[Candidate], length: int
) -> int:
    """How many windows to measure on by default: on a CPU as many as take about as long as quantizing, on a GPU as many
    as its allowance of multiplications permits and four rounds of its free memory hold. Counted, not timed, so that a
    busy machine changes nothing."""
    one_of_each = {candidate.component.name: candidate for candidate in candidates}
    plan = one_of_each.values()  # about what a plan needs
    per_window = length * sum(work_of(model, candidate) for candidate in plan)
    if model.chain.device.type == "cuda":
        vocabulary, width = model.anatomy.component(model.anatomy.head).shape
        states = memory_on(model.chain.device, DEFAULT_MEMORY) // 2
        fitting = 4 * states // window_bytes(model.chain, length, width, vocabulary)
        most = min(MOST_WINDOWS, fitting, int(GPU_WORK / per_window))
    else:
        quantizing = sum(quantizing_work(candidate, 1) for candidate in plan)
        most = min(MOST_WINDOWS, int(quantizing / per_window))
    return max(LEAST_WINDOWS, most // LEAST_WINDOWS * LEAST_WINDOWS)


def model_identity(model: LoadedModel) -> dict[str, object]:
    """What a run stores about its model."""
    anatomy = model.anatomy
    return {
        "model": model.name,
        "source": model.source,
        "tokenizer": model.tokenizer_source,
        "model_type": anatomy.model_type,
        "model_fingerprint": model.fingerprint,
        "dtype": _dtype(model),
        "head": anatomy.head,
        "embedding": anatomy.embedding,
        "components": [c.to_json() for c in anatomy.components],
        **model.task.identity,
        "template": model.template,
        "template_digest": model.template_digest,
        **({"original": model.original} if model.original else {}),
    }


def _dtype(model: LoadedModel) -> str:
    return str(next(model.model.parameters()).dtype).removeprefix("torch.")
