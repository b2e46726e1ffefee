"""Chooses the engine: by name, by whether the model can run in parts, by where its weights are, and by precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kl_lens.measuring.engines import DEFAULT_MEMORY, ENGINES, Engine, FastEngine, PlainEngine
from kl_lens.measuring.noise import noise_floor
from kl_lens.measuring.perturbation import Candidate, Kernels
from kl_lens.measuring.precision import FLOAT32, TF32, TF32X3, fastest_within
from kl_lens.measuring.streamed import StreamedEngine
from kl_lens.model import LoadedModel
from kl_lens.run.samples import summarise


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


def chosen_engine(
    model: LoadedModel,
    candidates: Sequence[Candidate],
    ids: torch.Tensor,
    name: str = FastEngine.name,
    memory_budget: int = DEFAULT_MEMORY,
    deployed: Kernels | None = None,
    precision: str | None = None,
    known: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    scratch: Path | None = None,
) -> Engine:
    """The engine with the given precision, the run's (`known`), or the fastest that is exact enough."""
    build = partial(engine_for, name, model, ids, memory_budget, deployed, say, scratch=scratch)
    engine = build(precision or (None if known == FLOAT32 else known))
    if precision is None and known is None and deployed is None and engine.precision == TF32X3:
        noise = noise_floor(build(TF32), ids)["kl_teacher_to_student"]
        chosen = fastest_within(noise, median_kls(engine, candidates, ids))
        say(f"computing in {chosen}, because tf32 would add noise of {noise:.1e} nats")
        engine = engine if chosen == engine.precision else build(chosen)
    return engine


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
