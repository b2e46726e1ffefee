"""Writes a plan as a folder that transformers and vLLM open."""

from __future__ import annotations

import json
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
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.compressed_tensors.schemes import (
    CONFIG_FILE,
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
)
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.base import Target
    from kl_lens.weights.formats import Format, Quantized

WEIGHT_FILE = "model.safetensors"
FORMAT = "pt"
PARTS = ("shape", "packed", "zero_point", "scale")  # of a packed matrix, wide types first
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
    (folder / CONFIG_FILE).write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    notes = write_beside(model, folder)
    versions = {
        name: metadata.version(name) for name in ("transformers", "compressed-tensors")
    }
    settings = {
        "versions": versions,
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
            names[parameter]: t.contiguous()
            for parameter, t in state.items()
            if names[parameter] not in packed
        }
        self.heads = _packed_heads(target, model)
        self.chosen |= {
            name: Choice(recipe, recipe) for name, recipe in self.heads.items()
        }
        for name in sorted(model.further_heads.keys() - self.heads.keys()):
            tensor = torch.empty(
                model.further_heads[name].shape, device="meta"
            )  # read when it is written
            self._plain[name] = tensor.half() if tensor.dim() > 1 else tensor
        entries = [
            Entry(name, _KINDS[t.dtype], tuple(t.shape))
            for name, t in self._plain.items()
        ]
        entries += [
            entry for name in (*packed, *self.heads) for entry in self._entries(name)
        ]
        self.entries = sorted(
            entries, key=lambda entry: list(_KINDS.values()).index(entry.dtype)
        )

    def _is_packed(self, component: str) -> bool:
        return component in self._candidates and is_packed(
            self.chosen[component].recipe.grid
        )

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
        rows, columns = (
            head.shape if head else self._model.anatomy.component(source).shape
        )
        groups = columns // (fmt.group_size or columns)
        shapes = (
            (2,),
            (rows, _words(columns, fmt)),
            (_words(rows, fmt), groups),
            (rows, groups),
        )
        return [
            Entry(f"{name}_{part}", kind, shape)
            for part, kind, shape in zip(
                PARTS, ("I64", "I32", "I32", "F16"), shapes, strict=True
            )
            if part != "zero_point" or not fmt.symmetric
        ]

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
        quantized = (
            recipe.grid.quantize(read_stored(head), name)
            if head
            else store.quantized(source, recipe)
        )
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
        stored = (
            sum(tensor.nbytes for tensor in tensors),
            choice.reason,
            tensor_digest(*tensors),
            weights,
        )
        self.records.append(
            ExportedTensor(component, name, choice.planned, realised, *stored)
        )


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
    for component in model.anatomy.candidates:
        reason = target.keeps(component)
        planned = chosen[component.name].planned
        if reason is None and not isinstance(
            modules.get(component.weight.removesuffix(".weight")), nn.Linear
        ):
            reason = "it is not a Linear layer"
        if planned != FP16 and reason is not None:
            chosen[component.name] = Choice(
                planned, FP16, f"{planned}: {reason}; stored as {FP16}"
            )
    for siblings in fused(model.anatomy.candidates):
        recipes = [chosen[component.name].recipe for component in siblings]
        widest = max(
            recipes, key=lambda recipe: recipe.grid.bits_per_weight(siblings[0].shape)
        )
        shared = (
            FP16 if any(target.holds(widest.grid, c.shape) for c in siblings) else widest
        )
        for component, recipe in zip(siblings, recipes, strict=True):
            if recipe.grid != shared.grid:
                reason = f"{recipe}: vLLM needs one format for {', '.join(c.kind for c in siblings)}"
                planned = chosen[component.name].planned
                chosen[component.name] = Choice(
                    planned, shared, f"{reason}; stored as {shared}"
                )
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
        return (
            codes.cpu()
            if fmt.symmetric
            else (codes.cpu().int() - 2 ** (fmt.bits - 1)).to(torch.int8)
        )

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
