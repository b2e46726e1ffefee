"""Chooses the engine: by name, by whether the model can run in parts, and by where its weights are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, ENGINES, Engine, FastEngine, PlainEngine
from kl_lens.sensitivity.perturbation import Kernels
from kl_lens.sensitivity.streamed import StreamedEngine


def engine_for(
    name: str,
    model: LoadedModel,
    ids: torch.Tensor,
    memory_budget: int = DEFAULT_MEMORY,
    deployed: Kernels | None = None,
    say: Callable[[str], None] = lambda text: None,
    precision: str | None = None,
) -> Engine:
    """The engine of this name; for a model that cannot run in parts the plain one, with a message that says why."""
    doubt = model.chain.doubt(ids) if name == FastEngine.name else None
    if doubt is not None:
        say(f"{model.name}: {doubt}; using the plain engine, which runs the whole model for every candidate")
        name = PlainEngine.name
    if model.residency is not None and name == FastEngine.name:
        return StreamedEngine(model, memory_budget, deployed, precision)
    return ENGINES[name](model, memory_budget, deployed, precision)
