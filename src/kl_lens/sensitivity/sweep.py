"""The sweep: every candidate on every window, committed as it happens, taken up again where it stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.runs import CALIBRATION, Run, role_as
from kl_lens.samples import WindowMetrics, summarise
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, Engine, FastEngine, engine_for
from kl_lens.sensitivity.metrics import TeacherRows, check_finite, compare, window_metrics
from kl_lens.sensitivity.perturbation import Candidate, Kernels
from kl_lens.sensitivity.precision import FLOAT32, TF32, TF32X3, accuracy_of, fastest_within
from kl_lens.sensitivity.settling import Settled, settled
from kl_lens.text import Windows


@dataclass
class Progress:
    """What a progress display needs; the command line replaces the callbacks."""

    started: Callable[[float, float], None] = lambda total, done: None  # work in all, work already done
    advanced: Callable[[float, str], None] = lambda work, what: None
    message: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class SweepResult:
    """How a sweep went; the numbers themselves are in the run."""

    candidates: int
    windows: int
    tokens: int
    measured: int  # candidate-windows measured now
    reused: int  # candidate-windows that the run had already
    seconds: float
    settled: Settled | None = None
    precision: str = FLOAT32  # of products


@dataclass
class Sweep:
    """Measures candidates on windows into a run.

    Example:
        >>> with Run.create(folder) as run:
        ...     Sweep(model, run).measure(candidates, windows)
    """

    model: LoadedModel
    run: Run
    engine: str = FastEngine.name
    memory_budget: int = DEFAULT_MEMORY
    progress: Progress = field(default_factory=Progress)
    deployed: Kernels | None = None  # measure with a runtime's activations, not with quantized weights alone
    precision: str | None = (
        None  # of products on a GPU; when not given, the run's, or the fastest that is exact enough
    )

    def measure(
        self, candidates: Sequence[Candidate], windows: Windows, role: str = CALIBRATION
    ) -> SweepResult:
        """All candidates on all windows; what the run holds already is not measured again."""
        begin = time.perf_counter()
        self.identify(windows, role)
        self.bind(candidates)
        text, role = role, self._role(role)
        engine = self._engine(candidates, windows.ids)
        done = self.run.measured_windows(role)
        wanted = range(len(windows))
        work = {str(c): self._work(c) for c in candidates}
        total = sum(work.values()) * len(wanted)
        finished = sum(work[str(c)] * len(done.get(_key(c), set()) & set(wanted)) for c in candidates)
        reused = sum(len(done.get(_key(c), set()) & set(wanted)) for c in candidates)
        self.progress.started(total, finished)
        measured = 0
        for slab in engine.slabs(windows.ids):
            missing = [w for w in slab if any(w not in done.get(_key(c), ()) for c in candidates)]
            if missing:
                measured += self._measure_slab(
                    engine, candidates, windows.ids, missing, done, (text, role), work
                )
        return SweepResult(
            candidates=len(candidates),
            windows=len(windows),
            tokens=windows.tokens,
            measured=measured,
            reused=reused,
            seconds=time.perf_counter() - begin,
            precision=engine.precision,
        )

    def _engine(self, candidates: Sequence[Candidate], ids: torch.Tensor) -> Engine:
        """With the precision asked for, that of the run, or the fastest that is exact enough; the run keeps it."""
        say = self.progress.message

        def build(precision: str | None) -> Engine:
            made = engine_for(self.engine, self.model, ids, self.memory_budget, self.deployed, say, precision)
            made.scratch = self.run.folder
            return made

        known = self.run.identity.get("precision")
        engine = build(self.precision or (None if known == FLOAT32 else known))
        if self.precision is None and known is None and engine.precision == TF32X3:
            noise = noise_floor(build(TF32), ids)["kl_teacher_to_student"]
            chosen = fastest_within(noise, _medians(engine, candidates, ids))
            say(f"products in {chosen}: tf32 would add noise of {noise:.1e} nats")
            engine = engine if chosen == engine.precision else build(chosen)
        if isinstance(engine, FastEngine) and self.deployed is None:
            self.run.identify({"precision": accuracy_of(engine.precision)})
        return engine

    def measure_until_settled(
        self,
        candidates: Sequence[Candidate],
        windows: Windows,
        *,
        per_round: int = 8,
        threshold: float = 0.9,
    ) -> SweepResult:
        """Windows in rounds, until the ranking no longer depends on which of them were drawn."""
        result: SweepResult | None = None
        measured, begin = 0, time.perf_counter()
        for count in [*range(per_round, len(windows), per_round), len(windows)]:
            result = self.measure(candidates, windows.first(count))
            measured += result.measured
            state = settled(self._values(candidates, CALIBRATION, count), threshold)
            self.progress.message(f"{count} windows: {state}")
            if state.is_settled:
                break
        assert result is not None
        return replace(result, measured=measured, seconds=time.perf_counter() - begin, settled=state)

    def _values(self, candidates: Sequence[Candidate], role: str, count: int) -> dict[str, list[list[float]]]:
        """Per format, each candidate's KL window by window."""
        values: dict[str, list[list[float]]] = {}
        for candidate in candidates:
            samples = self.run.samples(self._role(role), *_key(candidate), windows=count)
            row = [s.kl_teacher_to_student / s.tokens for s in samples]
            values.setdefault(candidate.format, []).append(row)
        return values

    def _role(self, text: str) -> str:
        """What is measured on a text is filed under whose activations it was measured with."""
        return role_as(text, self.deployed.name if self.deployed else None)

    def identify(self, windows: Windows, role: str = CALIBRATION) -> None:
        """Fixes what the run is about, or refuses a model or a text that is not the run's."""
        self.run.identify(model_identity(self.model))
        known = windows.provenance()
        identity = {name: known[name] for name in ("source", "split", "order", "length", "seed", "stride")}
        self.run.identify_text(role, identity, [_hash(row) for row in windows.ids])
        self.run.store("text", role, known)

    def bind(self, candidates: Sequence[Candidate]) -> None:
        """Fixes what learnt recipes are made from: what other statistics gave must not stand beside it."""
        learnt = self.model.weights.learnt_by(candidate.format for candidate in candidates)
        if learnt is not None:
            self.run.identify({"statistics": learnt})

    def _measure_slab(
        self,
        engine: Engine,
        candidates: Sequence[Candidate],
        ids: torch.Tensor,
        missing: Sequence[int],
        done: dict[tuple[str, str], set[int]],
        roles: tuple[str, str],  # of the text, and of what is measured on it
        work: dict[str, float],
    ) -> int:
        text, role = roles
        self.progress.message(f"original model on {len(missing)} windows")
        engine.prepare(ids[list(missing)])
        entropies = engine.teacher_cross_entropy()
        check_finite("the original model", [(missing[k], float(e)) for k, e in enumerate(entropies)])
        counts = (engine.chain.task.targets(ids[list(missing)]) >= 0).sum(1).tolist()
        self.run.store_teacher(
            text, [(w, n, float(e)) for w, n, e in zip(missing, counts, entropies, strict=True)]
        )
        if self.run.load("noise", role) is None:
            self.run.store("noise", role, noise_floor(engine, ids[list(missing)]))
        dtype = str(next(self.model.model.parameters()).dtype).removeprefix("torch.")
        measured = 0
        # Groups depend on the full list, never on what is left of it: a resumed sweep repeats the same arithmetic.
        every = [c.perturbation for c in candidates]
        groups = [
            group
            for group in engine.groups(every)
            if any(not set(missing) <= done.get(_key(candidates[index]), set()) for index in group)
        ]
        begin = time.perf_counter()
        for group, results in engine.in_turn(every, groups):
            members = [candidates[index] for index in group]
            seconds, begin = (time.perf_counter() - begin) / len(members), time.perf_counter()
            for candidate, metrics in zip(members, results, strict=True):
                known = done.get(_key(candidate), set())
                check_finite(str(candidate), [(missing[w.window], w.kl_teacher_to_student) for w in metrics])
                fresh = [_renumbered(w, missing[w.window]) for w in metrics if missing[w.window] not in known]
                if fresh:
                    self.run.store_samples(role, *_key(candidate), fresh, seconds, dtype)
                    measured += len(fresh)
                    self.progress.advanced(work[str(candidate)] * len(fresh), str(candidate))
        return measured

    def _work(self, candidate: Candidate) -> float:
        """Relative cost of a candidate: the blocks it runs through, and the head."""
        anatomy = self.model.anatomy
        blocks = sum(c.parameters for c in anatomy.candidates if c.block is not None) / max(1, anatomy.blocks)
        head = anatomy.component(anatomy.head).parameters
        start = candidate.component.block
        if start is None:
            start = anatomy.blocks if candidate.component.name == anatomy.head != anatomy.embedding else 0
        if self.engine != FastEngine.name:
            start = 0
        return blocks * (anatomy.blocks - start) + 2 * head


def model_identity(model: LoadedModel) -> dict[str, object]:
    """What a run stores about its model."""
    anatomy = model.anatomy
    return {
        "model": model.name,
        "source": model.source,
        "tokenizer": model.tokenizer_source,
        "model_type": anatomy.model_type,
        "model_fingerprint": model.fingerprint,
        "dtype": str(next(model.model.parameters()).dtype).removeprefix("torch."),
        "head": anatomy.head,
        "embedding": anatomy.embedding,
        "components": [c.to_json() for c in anatomy.components],
        **model.task.identity,
    }


def noise_floor(engine: Engine, ids: torch.Tensor, windows: int = 4) -> dict[str, float]:
    """The teacher against itself in another batch position: what the measuring alone makes of no difference.

    On tensor cores: twice the distance of what they give from float32, since teacher and student are both computed so.
    """
    ids = ids[:windows].to(engine.chain.device)
    sides = 1 if engine.precision == FLOAT32 else 2
    together = engine.chain.full_logits(ids)
    metrics: list[WindowMetrics] = []
    for index in range(len(ids)):
        targets = torch.full((ids.shape[1],), -1, device=ids.device)
        alone = engine.logits(ids[index : index + 1])[0]
        rows = compare(TeacherRows.of(together[index], targets), alone)
        signal = together[index].square().sum(-1, dtype=torch.float64).cpu().numpy()
        metrics.append(window_metrics(index, rows, signal, 1, engine.vocabulary))
    summary = summarise(metrics)
    names = ("kl_teacher_to_student", "kl_student_to_teacher", "mse", "kl_max")
    return {name: sides * summary[name].value for name in names}


def _medians(
    engine: Engine, candidates: Sequence[Candidate], ids: torch.Tensor, each: int = 8
) -> list[float]:
    """Per format, the median KL of a few candidates spread over the network, on a few windows."""
    engine.prepare(ids[:4])
    by_format: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_format.setdefault(candidate.format, []).append(candidate)
    medians = []
    for members in by_format.values():
        some = members[:: -(-len(members) // each)]
        results = engine.measure([candidate.perturbation for candidate in some])
        medians.append(float(np.median([summarise(w)["kl_teacher_to_student"].value for w in results])))
    return medians


def _key(candidate: Candidate) -> tuple[str, str]:
    return candidate.component.name, candidate.format


def _hash(ids: torch.Tensor) -> str:
    return hashlib.blake2b(ids.cpu().to(torch.int64).numpy().tobytes(), digest_size=8).hexdigest()


def _renumbered(window: WindowMetrics, index: int) -> WindowMetrics:
    return replace(window, window=index)
