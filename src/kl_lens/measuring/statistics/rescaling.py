"""Equivalent rescaling: makes columns that are hard to round smaller, and the norm before them larger.

Factors are powers of two, so the weights stay exact and the model computes the same. Which vector of a block can be
scaled against which columns is found by testing: the readers' inputs follow it exactly, and the block's output is the
same once their columns compensate. Factors are 2^round(exponent × log₂ of the inputs' size), as in AWQ, with the
exponent that gives the readers' outputs the smallest error in a recipe.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kl_lens.base.errors import CheckpointError, FormatError
from kl_lens.measuring.statistics.watching import ProductWatch
from kl_lens.model import LoadedModel, States
from kl_lens.model.chain import BlockCalls
from kl_lens.run.records import Component
from kl_lens.weights.quantizers import InputStatistics
from kl_lens.weights.recipes import Recipe, fitting_recipe
from kl_lens.weights.store import Statistics

EXPONENTS = (0.25, 0.5, 0.75, 1.0)
WORTH = 0.98  # smaller savings than this are not worth a change
_SAME = 1e-4  # relative tolerance for rounding


@dataclass(frozen=True)
class Rescaling:
    """A vector that is divided by `factors`, and the components whose columns are multiplied by them."""

    vector: str
    readers: tuple[str, ...]
    exponent: float  # 0: unchanged
    error: float  # of the readers' outputs, relative to no rescaling
    factors: torch.Tensor = field(repr=False)


def rescalings(model: LoadedModel, statistics: Statistics, recipe: Recipe) -> list[Rescaling]:
    """The best rescaling of every vector, measured by a recipe's error; does not change the model."""
    model.require_memory("rescaling")
    return [_best(model, statistics, recipe, vector, readers) for vector, readers in pairs(model)]


def changed_weights(model: LoadedModel, found: Sequence[Rescaling]) -> dict[str, torch.Tensor]:
    """Parameter → new values; checked on the model's logits."""
    changed: dict[str, torch.Tensor] = {}
    for one in found:
        if one.exponent:
            changed[one.vector] = model.model.get_parameter(one.vector).data / one.factors
            for reader in one.readers:
                name = model.anatomy.component(reader).weight
                changed[name] = model.model.get_parameter(name).data * one.factors
    ids = _probe_ids(model)
    before = model.chain.full_logits(ids)
    with _in_place(model, changed):
        after = model.chain.full_logits(ids)
    if not _is_same(after, before):
        raise CheckpointError(f"{model.name}: rescaling would change its outputs; nothing was written")
    return changed


def write_rescaled(model: LoadedModel, changed: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes the checkpoint with the changed weights, in the same data types."""
    files = sorted(model.folder.glob("*.safetensors"))
    places: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file)
    if missing := [name for name in changed if name not in places]:
        raise CheckpointError(
            f"{model.folder}: no safetensors file holds {missing[0]} under that name; "
            "save the model with transformers first"
        )
    folder.mkdir(parents=True)
    for path in model.folder.iterdir():
        if path.is_file() and path not in files:
            shutil.copy2(path, folder / path.name)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            kept = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            about = tensors.metadata()
        for name in kept.keys() & changed.keys():
            stored = changed[name].to(kept[name].dtype).cpu().contiguous()
            if not torch.equal(stored.float(), changed[name].float().cpu()):
                raise FormatError(f"{name}: {kept[name].dtype} cannot hold the rescaled values exactly")
            kept[name] = stored
        save_file(kept, folder / file.name, about)


def pairs(model: LoadedModel) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each vector that can be scaled against columns of components, and those components."""
    chain, anatomy = model.chain, model.anatomy
    calls = chain.calls(_probe_ids(model))
    states = States(calls.hidden)
    owners: dict[int, int] = {}
    for block in chain.blocks:
        for parameter in block.parameters():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for index, block in enumerate(chain.blocks):
        here = [c for c in anatomy.candidates if c.blocks == (index,) and len(c.shape) == 2]
        before, given = _watched(model, index, here, calls, states)
        for name, vector in block.named_parameters(prefix=f"{chain.blocks_name}.{index}"):
            if vector.dim() != 1 or owners[id(vector)] > 1:
                continue
            factors = torch.ones_like(vector)
            factors[::2], factors[1::3] = 2.0, 0.5
            with _in_place(model, {name: vector.data * factors}):
                moved, _ = _watched(model, index, here, calls, states)
            readers = [
                c for c in here
                if c.shape[-1] == len(vector) and _is_same(moved[c.name], before[c.name] * factors)
            ]  # fmt: skip
            weights = {c.weight: model.model.get_parameter(c.weight).data / factors for c in readers}
            if readers:
                with _in_place(model, weights | {name: vector.data * factors}):
                    after = chain.run(states, calls, index, index + 1)
                if _is_same(after.hidden, given.hidden):
                    yield name, tuple(c.name for c in readers)
        states = given


def _best(
    model: LoadedModel, statistics: Statistics, recipe: Recipe, vector: str, readers: tuple[str, ...]
) -> Rescaling:
    known = statistics.of(readers[0])
    size = known.second_moments.diagonal().clamp_min(1e-30).sqrt().log2()
    plain = torch.zeros_like(size).exp2()
    errors = {0.0: _error(model, known, recipe, readers, plain)}
    tried = {0.0: plain}
    for exponent in EXPONENTS:
        tried[exponent] = (exponent * (size - size.mean())).round().exp2()
        errors[exponent] = _error(model, known, recipe, readers, tried[exponent])
    best = min(errors, key=lambda exponent: errors[exponent])
    best = best if errors[best] < WORTH * errors[0.0] else 0.0
    share = errors[best] / errors[0.0] if errors[0.0] else 1.0
    device = model.model.get_parameter(vector).device
    return Rescaling(vector, readers, best, share, tried[best].to(device))


def _error(
    model: LoadedModel, known: InputStatistics, recipe: Recipe, readers: Sequence[str], factors: torch.Tensor
) -> float:
    """E‖(W − Q) x‖² of all readers, with their columns multiplied and their inputs divided."""
    moments = known.second_moments / factors[:, None] / factors
    total = 0.0
    for reader in readers:
        component = model.anatomy.component(reader)
        chosen = fitting_recipe(recipe, component.shape)[0]
        weight = model.model.get_parameter(component.weight).data.float().cpu() * factors
        own = InputStatistics(moments, known.tokens) if chosen.quantizer.learns else None
        stored = chosen.quantizer.quantize(weight, chosen.grid, reader, own)
        errors = weight - chosen.grid.dequantize(stored)
        total += float(((errors @ moments) * errors).sum(dtype=torch.float64))
    return total


class _Inputs:
    """The inputs of one weight, batch by batch; `ProductWatch` fills it."""

    def __init__(self, columns: int) -> None:
        self.columns, self.in_parts = columns, False
        self.rows: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor, expert: int = 0) -> bool:
        self.rows.append(inputs.reshape(-1, self.columns).float())
        return bool(torch.isfinite(self.rows[-1].sum()))


def _watched(
    model: LoadedModel, index: int, components: Sequence[Component], calls: BlockCalls, states: States
) -> tuple[dict[str, torch.Tensor], States]:
    sinks = {c.name: _Inputs(c.shape[-1]) for c in components}
    weights = {c.name: model.model.get_parameter(c.weight).data for c in components}
    with ProductWatch(weights, sinks, lambda _: f"in block {index}"):
        given = model.chain.run(states, calls, index, index + 1)
    return {name: torch.cat([*s.rows, torch.empty(0, s.columns)]) for name, s in sinks.items()}, given


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.numel():
        return False
    return bool((one - other).abs().max() <= _SAME * other.abs().max())


@contextmanager
def _in_place(model: LoadedModel, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    parameters = {name: model.model.get_parameter(name) for name in weights}
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = originals[name]


def _probe_ids(model: LoadedModel) -> torch.Tensor:
    rows = model.anatomy.component(model.anatomy.embedding).shape[0]
    return torch.randint(0, rows, (2, 33), generator=torch.Generator().manual_seed(0))
