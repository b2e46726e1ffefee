"""Writes a plan as a folder that transformers and vLLM open."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from kl_lens.model.files import Stored, read_stored
from kl_lens.run.records import Component, Plan
from kl_lens.targets.compressed_tensors.schemes import (
    configuration,
    fused,
    is_packed,
)
from kl_lens.targets.exporting import (
    Choice,
    Entry,
    Piece,
    choices,
    floating,
)
from kl_lens.targets.folders import FolderContents
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.abilities import Target
    from kl_lens.weights.formats import Format, Quantized

_PACKED_AT_ONCE = 1 << 22  # weights


def folder_contents(target: Target, model: LoadedModel, plan: Plan) -> FolderContents:
    """What the folder of a plan holds."""
    model.require_memory(f"exporting to {target.title}")
    chosen = _chosen(target, model, plan)
    heads = _packed_heads(target, model)
    components = {c.weight: c for c in model.anatomy.components}
    aliases = {name for c in components.values() for name in c.tied_with}
    state = {
        name: tensor.detach().cpu()
        for name, tensor in model.model.state_dict().items()
        if not aliases & {name, name.removesuffix(".weight")}
    }
    # transformers' names → those in the file.
    names = checkpoint_names(model, state)
    plain: list[Piece] = []
    packed: list[Piece] = []
    for parameter, tensor in state.items():
        component = components.get(parameter)
        owner = component.name if component else parameter
        name = names[parameter]
        # What is never quantized keeps its values; a matrix that stays in 16 bits is rounded to them.
        fitting = torch.equal(tensor.half().float(), tensor.float())
        piece = partial(floating, owner, name, tensor.shape, read=tensor.float)
        if component is None or not component.quantizable:
            plain.append(piece(half=fitting))
            continue
        choice = chosen[owner]
        if is_packed(choice.recipe.grid):
            quantize = partial(model.weights.quantized, owner, choice.recipe)
            packed.append(_packed(owner, name, component.shape, choice, quantize))
        else:
            digest = partial(model.weights.digest, owner, FP16)
            plain.append(piece(half=True, choice=choice, digest=digest))
    further = model.further_heads
    for name in sorted(further.keys() - heads):
        shape = further[name].shape
        read = partial(read_stored, further[name])
        plain.append(floating(name, name, shape, read, half=len(shape) > 1))
    for name, recipe in heads.items():
        quantize = partial(_quantized_head, recipe, further[name])
        shape = further[name].shape
        packed.append(_packed(name, name, shape, Choice(recipe, recipe), quantize))
    recipes = {c.weight: chosen[c.name].recipe for c in model.anatomy.candidates}
    config = configuration(model, recipes | heads, names)
    return FolderContents([*plain, *packed], config, {"further_heads": bool(further)})


def _quantized_head(recipe: Recipe, stored: Stored) -> Quantized:
    return recipe.grid.quantize(read_stored(stored), stored.name)


def _packed(
    component: str,
    name: str,
    shape: Sequence[int],
    choice: Choice,
    quantize: Callable[[], Quantized],
) -> Piece:
    fmt = choice.recipe.grid
    rows, columns = shape
    groups = columns // (fmt.group_size or columns)
    entries = [
        Entry(f"{name}_shape", "I64", (2,)),
        Entry(f"{name}_packed", "I32", (rows, _words(columns, fmt))),
        Entry(f"{name}_scale", "F16", (rows, groups)),
    ]
    if not fmt.symmetric:
        zero_points = (_words(rows, fmt), groups)
        entries.append(Entry(f"{name}_zero_point", "I32", zero_points))

    def make() -> tuple[list[npt.NDArray[Any]], str]:
        quantized = quantize()
        return [part.numpy() for part in packed(fmt, quantized)], quantized.digest

    label = f"{name}_packed"
    return Piece(component, tuple(entries), choice, choice.recipe, make, label)


def checkpoint_names(
    model: LoadedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """transformers' names → those in checkpoints. What it would split (experts) keeps its own; it reads both."""
    whole: Any = model.model
    converted = revert_weight_conversion(whole, dict(tensors))
    renamed = {
        (tensor.data_ptr(), tensor.shape): name for name, tensor in converted.items()
    }
    return {
        name: renamed.get((tensor.data_ptr(), tensor.shape), name)
        for name, tensor in tensors.items()
    }


def _chosen(target: Target, model: LoadedModel, plan: Plan) -> dict[str, Choice]:
    modules = dict(model.model.named_modules())
    chosen = choices(model, plan, target.fit)

    def lower(component: Component, recipe: Recipe, reason: str) -> None:
        planned = chosen[component.name].planned
        chosen[component.name] = Choice(planned, recipe, f"{reason}; stored as {recipe}")

    for component in model.anatomy.candidates:
        planned = chosen[component.name].planned
        reason = target.keeps(component)
        module = modules.get(component.weight.removesuffix(".weight"))
        if reason is None and not isinstance(module, nn.Linear):
            reason = "it is not a Linear layer"
        if planned != FP16 and reason is not None:
            lower(component, FP16, f"{planned}: {reason}")
    for siblings in fused(model.anatomy.candidates):
        shape = siblings[0].shape
        recipes = [chosen[component.name].recipe for component in siblings]
        widest = max(recipes, key=lambda recipe: recipe.grid.bits_per_weight(shape))
        refused = any(target.holds(widest.grid, c.shape) for c in siblings)
        shared = FP16 if refused else widest
        kinds = ", ".join(component.kind for component in siblings)
        for component, recipe in zip(siblings, recipes, strict=True):
            if recipe.grid != shared.grid:
                lower(component, shared, f"{recipe}: vLLM needs one format for {kinds}")
    return chosen


def _packed_heads(target: Target, model: LoadedModel) -> dict[str, Recipe]:
    """Heads for further tokens, which vLLM reads, in 8 bits: their matrices, but no embeddings and gates of experts."""
    shapes = {name: stored.shape for name, stored in model.further_heads.items()}
    recipe = Recipe("int8")
    linear = re.compile(r"(?!.*embed).*(?<!gate)\.weight")
    matrices = [
        name for name in shapes if len(shapes[name]) == 2 and linear.fullmatch(name)
    ]
    # vLLM multiplies some as one: all or none. Its kernel for CPUs has no 8 bits, so there they stay in 16.
    all_fit = all(target.holds(recipe.grid, shapes[name]) is None for name in matrices)
    return dict.fromkeys(matrices, recipe) if all_fit else {}


def _words(numbers: int, fmt: Format) -> int:
    return -(-numbers * fmt.bits // 32)


def packed(fmt: Format, quantized: Quantized) -> list[torch.Tensor]:
    """The shape, codes and scales of a matrix, and its zero points if it has some."""

    def signed(codes: torch.Tensor) -> torch.Tensor:
        if fmt.symmetric:
            return codes.cpu()
        return (codes.cpu().int() - 2 ** (fmt.bits - 1)).to(torch.int8)

    step = max(1, _PACKED_AT_ONCE // quantized.shape[-1])
    words = [pack_to_int32(signed(rows), fmt.bits) for rows in quantized.data.split(step)]
    assert quantized.scales is not None
    shape = torch.tensor(quantized.shape)
    parts = [shape, torch.cat(words), quantized.scales.cpu()]
    if (zero_points := quantized.zero_points) is not None:
        parts.append(pack_to_int32(signed(zero_points), fmt.bits, packed_dim=0))
    return parts
