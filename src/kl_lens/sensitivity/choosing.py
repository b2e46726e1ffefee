"""Which engine measures a model: by its name, by whether the model runs in parts, by where its weights are."""

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
    """The engine of this name; the plain one, and a line that says why, where a model cannot be run in parts."""
    doubt = model.chain.doubt(ids) if name == FastEngine.name else None
    if doubt is not None:
        say(f"{model.name}: {doubt}; measured with the plain engine, which runs the whole model each time")
        name = PlainEngine.name
    if model.residency is not None and name == FastEngine.name:
        return StreamedEngine(model, memory_budget, deployed, precision)
    return ENGINES[name](model, memory_budget, deployed, precision)
