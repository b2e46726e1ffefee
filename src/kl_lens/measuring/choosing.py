"""Chooses the engine: by name, by whether the model can run in parts, by where its weights are, and by precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.measuring.engines import DEFAULT_MEMORY, ENGINES, Engine, FastEngine, PlainEngine
from kl_lens.measuring.metrics import TeacherRows, compare, window_metrics
from kl_lens.measuring.perturbation import Candidate, Kernels
from kl_lens.measuring.products import FLOAT32, TF32, TF32X3, fastest_within
from kl_lens.measuring.streamed import StreamedEngine
from kl_lens.model import LoadedModel
from kl_lens.run.samples import WindowMetrics, summarise


def engine_for(
    name: str,
    model: LoadedModel,
    ids: torch.Tensor,
    memory_budget: int = DEFAULT_MEMORY,
    deployed: Kernels | None = None,
    say: Callable[[str], None] = lambda text: None,
    precision: str | None = None,
    **how: Any,
) -> Engine:
    """The engine of this name; for a model that cannot run in parts the plain one, with a message that says why."""
    doubt = model.chain.doubt(ids) if name == FastEngine.name else None
    if doubt is not None:
        say(f"{model.name}: {doubt}; using the plain engine, which runs the whole model for every candidate")
        name = PlainEngine.name
    if model.residency is not None and name == FastEngine.name:
        return StreamedEngine(model, memory_budget, deployed, precision, **how)
    return ENGINES[name](model, memory_budget, deployed, precision, **how)


@dataclass(frozen=True)
class Job:
    """One sweep, for any process that has the model open."""

    candidates: Sequence[Candidate]
    ids: npt.NDArray[np.int64]
    engine: str = FastEngine.name
    memory_budget: int = DEFAULT_MEMORY
    deployed: Kernels | None = None
    precision: str | None = None  # requested
    known: str | None = None  # the run's precision
    statistics: str | None = None  # digest of those that methods learn from
    run: str = ""  # the folder that holds them

    def engine_on(
        self, model: LoadedModel, say: Callable[[str], None] = lambda text: None, scratch: Path | None = None
    ) -> Engine:
        """The engine with the requested precision, the run's, or the fastest that is exact enough."""
        ids = torch.from_numpy(np.array(self.ids))
        build = partial(
            engine_for, self.engine, model, ids, self.memory_budget, self.deployed, say, scratch=scratch
        )
        engine = build(self.precision or (None if self.known == FLOAT32 else self.known))
        open_choice = self.precision is None and self.known is None and self.deployed is None
        if open_choice and engine.precision == TF32X3:
            noise = noise_floor(build(TF32), ids)["kl_teacher_to_student"]
            chosen = fastest_within(noise, median_kls(engine, self.candidates, ids))
            say(f"computing in {chosen}, because tf32 would add noise of {noise:.1e} nats")
            engine = engine if chosen == engine.precision else build(chosen)
        return engine


def noise_floor(engine: Engine, ids: torch.Tensor, windows: int = 2) -> dict[str, float]:
    """What is measured when there is no difference: the teacher against itself in another batch position.

    On tensor cores: twice their distance from float32, because teacher and student both run on them.
    """
    ids = ids[:windows].to(engine.chain.device)
    sides = 1 if engine.precision == FLOAT32 else 2
    together = engine.chain.full_logits(ids)
    targets = torch.full((ids.shape[1],), -1, device=ids.device)
    metrics: list[WindowMetrics] = []
    for index in range(len(ids)):
        alone = engine.logits(ids[index : index + 1])[0]
        rows = compare(TeacherRows.of(together[index], targets), alone)
        # The signal is for the SQNR, which is not asked for.
        metrics += window_metrics([index], rows, np.ones(len(rows)), [1], engine.vocabulary)
    summary = summarise(metrics)
    names = ("kl_teacher_to_student", "kl_student_to_teacher", "mse", "kl_max")
    return {name: sides * summary[name].value for name in names}


def median_kls(
    engine: Engine, candidates: Sequence[Candidate], ids: torch.Tensor, each: int = 8
) -> list[float]:
    """Per format, the median KL of a few candidates spread over the network, on a few windows."""
    engine.prepare(ids[:4])
    by_format: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_format.setdefault(candidate.recipe, []).append(candidate)
    medians = []
    for members in by_format.values():
        some = members[:: -(-len(members) // each)]
        results = engine.measure([candidate.perturbation for candidate in some])
        medians.append(float(np.median([summarise(w)["kl_teacher_to_student"].value for w in results])))
    return medians
