"""The sweep: measures every candidate on every window, commits each result, and resumes where it stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kl_lens.base.errors import RunError
from kl_lens.base.progress import Progress
from kl_lens.measuring.engines import DEFAULT_MEMORY, FastEngine, memory_on
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
        ids = windows.ids.cpu().numpy().astype(np.int64)
        known = self.run.identity.get("precision")
        how = (self.engine, self.memory_budget, self.deployed, self.precision, known)
        job = Job(candidates, ids, *how, learnt, str(self.run.folder.absolute()))
        costs = [self._work(candidate) for candidate in candidates]
        runner = (
            None
            if self.workers
            else PieceRunner(job, job.engine_on(self.model, self.progress.message))
        )
        if runner is not None:
            layout = runner.layout
            pieces = (
                layout.share(costs, *self.share)
                if self.share
                else layout.spread(costs, 1, each=1)
            )
        else:
            assert self.workers is not None
            layout = self.workers.begin(job)
            pieces = layout.spread(costs, self.workers.count)
        if self.deployed is None and layout.engine == FastEngine.name:
            exact = layout.precision in (FLOAT32, TF32X3)  # as accurate as each other
            self.run.identify({"precision": FLOAT32 if exact else layout.precision})
        self.run.store(KERNELS, role, layout.fault or None)
        if self.workers and layout.fault:  # this process has not seen it
            self.model.warn(
                f"{layout.fault}; transformers' own code computes this model instead"
            )
        done = self.run.measured_windows(role)
        quantizing = [
            quantizing_work(c, windows.length) / len(windows) for c in candidates
        ]
        shown = [cost + more for cost, more in zip(costs, quantizing, strict=True)]
        reused = self._say_how_much(candidates, pieces, shown, done)
        left = [
            piece for piece in (each.left(candidates, done) for each in pieces) if piece
        ]
        if not noise or self.run.load("noise", role) is not None:
            left = [replace(piece, noise=False) for piece in left]
        elif left and not self.share and not self.workers:
            left[0] = replace(left[0], noise=True)
        if self.share or (left and self.workers):  # results come in any order
            self.run.expect(role, map(key_of, candidates), _dtype(self.model))
        measured = 0
        for found in self._results(job, layout, left, runner):
            if found.teacher:
                self.run.store_teacher(text, found.teacher)
            if found.noise is not None:
                self.run.store("noise", role, found.noise)
            for index, metrics in found.candidates:
                fresh = [
                    w
                    for w in metrics
                    if w.window not in done.get(key_of(candidates[index]), ())
                ]
                if fresh:
                    key = key_of(candidates[index])
                    measured = measured + len(fresh)
                    self.run.store_samples(
                        role, *key, fresh, found.seconds, _dtype(self.model)
                    )
                    self.progress.advanced(
                        shown[index] * len(fresh), str(candidates[index])
                    )
        seconds = time.perf_counter() - begin
        return SweepResult(
            len(candidates),
            len(windows),
            windows.tokens,
            measured,
            reused,
            seconds,
            layout.precision,
        )

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
        done: Done,
    ) -> int:
        """Tells the progress display how much is left; returns the pairs that exist already."""
        reused = 0
        finished = 0.0
        total = 0.0
        for piece in pieces:
            for index in (index for group in piece.groups for index in group):
                there = len(
                    done.get(key_of(candidates[index]), set()).intersection(piece.windows)
                )
                reused = reused + there
                finished = finished + costs[index] * there
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

    def _role(self, text: str) -> str:
        """The role of measurements on a text, which includes the target whose activations were used."""
        return role_as(text, self.deployed.name if self.deployed else None)

    def identify(self, windows: Windows, role: str = CALIBRATION) -> None:
        """Records the run's model and text, or refuses others than the recorded ones."""
        self.run.identify(model_identity(self.model))
        known = windows.provenance()
        identity = {
            name: known[name]
            for name in ("source", "split", "order", "length", "seed", "stride")
        }
        if windows.bos is not None:
            identity["bos"] = windows.bos
        rows = (row.astype(np.int64).tobytes() for row in windows.ids.cpu().numpy())
        texts = [hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows]
        self.run.identify_text(role, identity, texts)
        self.run.store("text", role, known)

    def bind(self, candidates: Sequence[Candidate]) -> str | None:
        """Records the digest of the statistics that learnt recipes use: results from different ones must not be
        mixed."""
        learnt = self.model.weights.learnt_by(
            each.recipe for each in candidates if not each.is_state
        )
        if learnt is not None:
            self.run.identify({"statistics": learnt})
        return learnt

    def operations_left(
        self, candidates: Sequence[Candidate], windows: Windows, role: str = CALIBRATION
    ) -> float:
        """Approximate multiplications for everything that the run does not hold yet."""
        done = self.run.measured_windows(self._role(role))
        left = [
            len(windows) - len(done.get(key_of(c), set()) & {*range(len(windows))})
            for c in candidates
        ]
        return (
            2.0
            * windows.length
            * sum(n * self._work(c) for n, c in zip(left, candidates, strict=True))
        )

    def _work(self, candidate: Candidate) -> float:
        return work_of(self.model, candidate, self.engine)


def work_of(
    model: LoadedModel, candidate: Candidate, engine: str = FastEngine.name
) -> float:
    """Relative cost of a candidate: the parameters of the blocks it runs through, and twice the head's."""
    anatomy = model.anatomy
    start = (
        max(0, first_block(anatomy, candidate.perturbation))
        if engine == FastEngine.name
        else 0
    )
    blocks = sum(c.parameters for c in anatomy.candidates if c.block is not None) / max(
        1, anatomy.blocks
    )
    head = anatomy.component(anatomy.head).parameters
    return blocks * (anatomy.blocks - start) + 2 * head


def quantizing_work(candidate: Candidate, length: int) -> float:
    """Cost of quantizing a candidate's weight, in units of `work_of` per window; for forecasts only."""
    return (
        candidate.component.parameters
        * QUANTIZING.get(candidate.recipe.method, 0.0)
        / length
    )


def error_work(candidate: Candidate) -> float:
    """Cost of quantizing the few rows that show a candidate's error, in the same units."""
    return 10.0 * candidate.component.shape[-1] ** 2


def windows_by_cost(
    model: LoadedModel, candidates: Sequence[Candidate], length: int
) -> int:
    """How many windows to measure on by default: on a CPU as many as take about as long as quantizing, on a GPU as many
    as its allowance of multiplications permits and four rounds of its free memory hold. Counted, not timed, so that a
    busy machine changes nothing."""
    once = {
        each.component.name: each for each in candidates
    }.values()  # about what a plan needs
    each = length * sum(work_of(model, candidate) for candidate in once)
    quantizing = sum(quantizing_work(candidate, 1) for candidate in once)
    most = MOST_WINDOWS
    if on_gpu := model.chain.device.type == "cuda":
        states = memory_on(model.chain.device, DEFAULT_MEMORY) // 2
        head = model.anatomy.component(model.anatomy.head)
        most = min(
            most,
            4 * states // window_bytes(model.chain, length, head.shape[1], head.shape[0]),
        )
    most = min(most, int((GPU_WORK if on_gpu else quantizing) / each))
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
    }


def _dtype(model: LoadedModel) -> str:
    return str(next(model.model.parameters()).dtype).removeprefix("torch.")
