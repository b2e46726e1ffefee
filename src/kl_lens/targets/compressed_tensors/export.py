"""Writes a plan as a folder that transformers and vLLM open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from kl_lens.base.files import tensor_digest
from kl_lens.model.files import read_stored
from kl_lens.run.records import Artifact, Component, ExportedTensor, Plan
from kl_lens.targets.compressed_tensors.schemes import (
    configuration,
    fused,
    is_packed,
)
from kl_lens.targets.exporting import (
    Choice,
    Entry,
    choices,
    file_size,
    record,
    write_beside,
    write_file,
    write_settings,
)
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.base import Target
    from kl_lens.weights.formats import Format, Quantized

WEIGHT_FILE = "model.safetensors"
FORMAT = "pt"
_KINDS = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float16: "F16",
}
_PACKED_AT_ONCE = 1 << 22  # weights


def export(target: Target, model: LoadedModel, plan: Plan, folder: Path) -> Artifact:
    file = _File(target, model, plan)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / WEIGHT_FILE, file.entries, FORMAT, file.bytes_of)
    recipes = {c.weight: file.chosen[c.name].recipe for c in model.anatomy.candidates}
    config = configuration(model, recipes | file.heads, file.names)
    write_settings(folder, config)
    notes = write_beside(model, folder)
    packages = ("transformers", "compressed-tensors")
    settings = {
        "versions": {name: metadata.version(name) for name in packages},
        "notes": notes,
        "further_heads": bool(model.further_heads),
    }
    return record(target.name, model, plan, folder, file.records, **settings)


def file_bytes(target: Target, model: LoadedModel, plan: Plan) -> int:
    """The exact size of the file that `export` would write, without quantizing anything."""
    return file_size(_File(target, model, plan).entries, FORMAT)


class _File:
    """The tensors of one file, and the records of those whose bytes were given."""

    def __init__(self, target: Target, model: LoadedModel, plan: Plan) -> None:
        model.require_memory(f"exporting to {target.title}")
        self._model = model
        self.chosen = _chosen(target, model, plan)
        self._candidates = {component.name for component in model.anatomy.candidates}
        # Zero points and scales, which come after packed matrices.
        self._waiting: dict[str, torch.Tensor] = {}
        self.records: list[ExportedTensor] = []
        owners = {c.weight: c.name for c in model.anatomy.components}
        aliases = {name for c in model.anatomy.components for name in c.tied_with}
        state = {
            name: self._stored(owners.get(name, name), tensor.detach().cpu())
            for name, tensor in model.model.state_dict().items()
            if not aliases & {name, name.removesuffix(".weight")}
        }
        self.names = names = checkpoint_names(model, state)
        self._sources = {
            names[parameter]: owners.get(parameter, parameter) for parameter in state
        }
        packed = [
            name for name, source in self._sources.items() if self._is_packed(source)
        ]
        self._plain = {
            names[parameter]: tensor.contiguous()
            for parameter, tensor in state.items()
            if names[parameter] not in packed
        }
        self.heads = _packed_heads(target, model)
        self.chosen |= {
            name: Choice(recipe, recipe) for name, recipe in self.heads.items()
        }
        for name in sorted(model.further_heads.keys() - self.heads.keys()):
            # Read when it is written.
            tensor = torch.empty(model.further_heads[name].shape, device="meta")
            self._plain[name] = tensor.half() if tensor.dim() > 1 else tensor
        entries = [
            Entry(name, _KINDS[t.dtype], tuple(t.shape))
            for name, t in self._plain.items()
        ]
        entries += [
            entry for name in (*packed, *self.heads) for entry in self._entries(name)
        ]
        widths = list(_KINDS.values())
        self.entries = sorted(entries, key=lambda entry: widths.index(entry.dtype))

    def _is_packed(self, component: str) -> bool:
        candidate = component in self._candidates
        return candidate and is_packed(self.chosen[component].recipe.grid)

    def _stored(self, component: str, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix that stays in 16 bits is rounded to them; what is never quantized keeps its values."""
        if self._is_packed(component):
            return tensor
        half = tensor.half()
        exact = torch.equal(half.float(), tensor.float())
        return half if component in self._candidates or exact else tensor.float()

    def _entries(self, name: str) -> list[Entry]:
        """Of a packed matrix."""
        source = self._sources.get(name, name)
        head = self._model.further_heads.get(name)
        fmt = self.chosen[source].recipe.grid
        owner = head or self._model.anatomy.component(source)
        rows, columns = owner.shape
        groups = columns // (fmt.group_size or columns)
        entries = [
            Entry(f"{name}_shape", "I64", (2,)),
            Entry(f"{name}_packed", "I32", (rows, _words(columns, fmt))),
            Entry(f"{name}_zero_point", "I32", (_words(rows, fmt), groups)),
            Entry(f"{name}_scale", "F16", (rows, groups)),
        ]
        if fmt.symmetric:
            del entries[2]
        return entries

    def bytes_of(self, entry: Entry) -> npt.NDArray[np.uint8]:
        name = entry.name.removesuffix("_shape")
        source = self._sources.get(name, name)
        head = self._model.further_heads.get(name)
        if (tensor := self._plain.get(entry.name)) is not None:
            tensor = read_stored(head).to(tensor.dtype) if head else tensor
            self._add(entry.name, source, tensor)
            return _raw(tensor)
        if entry.name in self._waiting:
            return _raw(self._waiting.pop(entry.name))
        recipe = self.chosen[source].recipe
        store = self._model.weights
        if head:
            quantized = recipe.grid.quantize(read_stored(head), name)
        else:
            quantized = store.quantized(source, recipe)
        parts = packed(recipe.grid, quantized)
        self._add(f"{name}_packed", source, *parts.values(), weights=quantized.digest)
        self._waiting |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
        return _raw(self._waiting.pop(entry.name))

    def _add(
        self, name: str, component: str, *tensors: torch.Tensor, weights: str = ""
    ) -> None:
        choice = self.chosen.get(component, Choice(FP16, FP16))
        realised = choice.recipe if tensors[0].dtype != torch.float32 else "fp32"
        if component in self._candidates and not weights:
            weights = self._model.weights.digest(component, FP16)
        labels = component, name, choice.planned, realised
        size = sum(tensor.nbytes for tensor in tensors)
        digest = tensor_digest(*tensors)
        self.records.append(ExportedTensor(*labels, size, choice.reason, digest, weights))


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


def packed(fmt: Format, quantized: Quantized) -> dict[str, torch.Tensor]:
    """The tensors of a matrix."""

    def signed(codes: torch.Tensor) -> torch.Tensor:
        if fmt.symmetric:
            return codes.cpu()
        return (codes.cpu().int() - 2 ** (fmt.bits - 1)).to(torch.int8)

    step = max(1, _PACKED_AT_ONCE // quantized.shape[-1])
    words = [pack_to_int32(signed(rows), fmt.bits) for rows in quantized.data.split(step)]
    assert quantized.scales is not None
    parts = {
        "shape": torch.tensor(quantized.shape),
        "packed": torch.cat(words),
        "scale": quantized.scales.cpu(),
    }
    if quantized.zero_points is not None:
        parts["zero_point"] = pack_to_int32(
            signed(quantized.zero_points), fmt.bits, packed_dim=0
        )
    return parts


def _raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.contiguous().numpy().reshape(-1).view(np.uint8)
