"""Writes a plan as a folder that `mlx_lm.load` opens as it is."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.digests import bytes_digest
from kl_lens.base.errors import TargetError
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.mlx.configuration import CONFIG_FILE
from kl_lens.targets.mlx.file import PARTS, Entry, file_size, write_file
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe, parsed

if TYPE_CHECKING:
    from kl_lens.model import Anatomy, LoadedModel
    from kl_lens.targets.mlx.layout import Layout, Matrix
    from kl_lens.weights.formats import Quantized
    from kl_lens.weights.store import WeightStore

WEIGHT_FILE, GENERATION_FILE = "model.safetensors", "generation_config.json"
_FLOATS = {"F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class Choice:
    """What a component is stored as."""

    planned: Recipe
    recipe: Recipe
    reason: str | None = None  # why they differ


def export(
    model: LoadedModel, plan: Plan, layout: Layout, folder: Path, *, with_tokenizer: bool = True
) -> Artifact:
    """Writes weights, configuration and tokenizer to a folder; `Target.export` adds the record.

    Everything that is not quantized is float16, as after `mlx_lm.convert --dtype float16`.
    """
    chosen = choices(plan, model.anatomy)
    learnt = model.weights.learnt_by((choice.recipe for choice in chosen.values()), plan.statistics)
    file = _File(layout, chosen, model.weights)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / WEIGHT_FILE, file.entries, file.bytes_of)
    config = layout.config | quantization(layout, chosen)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (generation := model.folder / GENERATION_FILE).is_file():
        shutil.copyfile(generation, folder / GENERATION_FILE)
    notes = []
    if model.tokenizer is None:
        notes = ["mlx_lm.load wants a tokenizer, and the checkpoint has none; kl-lens opens the folder"]
    elif with_tokenizer:
        model.tokenizer.save_pretrained(folder)
        notes = [model.unread_tokens] if model.unread_tokens else []
    tensors = file.records()
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    return Artifact(
        target="mlx",
        plan=plan.name,
        files=tuple(sorted(path.name for path in folder.iterdir())),
        tensors=tensors,
        planned_bytes=plan.bytes if plan.bytes is not None else sum(tensor.bytes for tensor in tensors),
        realised_bytes=0,  # the target counts what its runtime loads
        model=model.name,
        model_fingerprint=model.fingerprint,
        settings={
            "family": model.anatomy.model_type,
            "versions": versions,
            "notes": notes,
            **({"statistics": learnt} if learnt else {}),
        },
    )


def file_bytes(model: LoadedModel, plan: Plan, layout: Layout) -> int:
    """The exact size of the file that `export` would write, without quantizing anything."""
    return file_size(_File(layout, choices(plan, model.anatomy), model.weights).entries)


def choices(plan: Plan, anatomy: Anatomy) -> dict[str, Choice]:
    """Every candidate's recipe in the file, by component; what the plan does not name is FP16."""
    planned: dict[str, Recipe] = {}
    for name, recipe in parsed(plan.assignment).items():
        component = anatomy.component(name)
        if planned.setdefault(component.name, recipe) != recipe:
            raise TargetError(f"{name} is the same weight as {component.name}, but planned as {recipe}")
        if not component.quantizable and recipe != FP16:
            raise TargetError(f"{name} is planned as {recipe}, but must stay as it is: {component.reason}")
        if recipe != FP16 and not isinstance(recipe.grid, AffineFormat):
            raise TargetError(
                f"plan {plan.name}: MLX has no format {recipe.grid.name!r} ({name}); make a plan for it with: "
                "kl-lens plan --target mlx"
            )
    chosen = {}
    for component in anatomy.candidates:
        wanted = planned.get(component.name, FP16)
        chosen[component.name] = Choice(wanted, *fitting_recipe(wanted, component.shape))
    return chosen


def quantization(layout: Layout, chosen: dict[str, Choice]) -> dict[str, Any]:
    """The sections of config.json that mlx-lm reads: bits, group size and mode of every path."""
    paths = {}
    for matrix in layout.matrices:
        grid = chosen[matrix.component].recipe.grid
        if isinstance(grid, AffineFormat):
            paths[matrix.name] = {"group_size": grid.group_size, "bits": grid.bits, "mode": "affine"}
    if not paths:
        return {}
    usual, _ = Counter(json.dumps(how) for how in paths.values()).most_common(1)[0]
    section = {**json.loads(usual), **paths}
    return {"quantization": section, "quantization_config": section}


class _File:
    """The tensors of one file."""

    def __init__(self, layout: Layout, chosen: dict[str, Choice], store: WeightStore) -> None:
        self._layout, self._chosen, self._store = layout, chosen, store
        self._waiting: dict[
            str, npt.NDArray[np.uint8]
        ] = {}  # scales and biases: they come after all matrices
        self._digests: dict[str, str] = {}  # matrix or other tensor → digest of its bytes
        self._weights: dict[str, str] = {}  # matrix → digest in the weight store
        self._matrices = {f"{matrix.name}.weight": matrix for matrix in layout.matrices}
        entries = [entry for matrix in layout.matrices for entry in self._entries(matrix)]
        entries += [
            Entry(name, "F32" if name in layout.full_precision else "F16", value.shape)
            for name, value in layout.values.items()
        ]
        # Wide types first, so that everything is aligned.
        self.entries = sorted(entries, key=lambda entry: entry.dtype == "F16")

    def _entries(self, matrix: Matrix) -> list[Entry]:
        name, grid = matrix.name, self._chosen[matrix.component].recipe.grid
        if not isinstance(grid, AffineFormat):
            return [Entry(f"{name}.weight", "F16", matrix.shape)]
        *outer, columns = matrix.shape
        assert grid.group_size is not None
        groups = (*outer, columns // grid.group_size)
        packed = Entry(f"{name}.weight", "U32", (*outer, columns * grid.bits // 32))
        return [packed, Entry(f"{name}.scales", "F16", groups), Entry(f"{name}.biases", "F16", groups)]

    def bytes_of(self, entry: Entry) -> npt.NDArray[np.uint8]:
        if entry.name in self._layout.values:
            value = self._layout.values[entry.name].astype(_FLOATS[entry.dtype])
            if not np.isfinite(value).all():
                raise TargetError(
                    f"{entry.name}: has values that {entry.dtype} cannot hold; rescale the weight"
                )
            data = _raw(value)
            self._digests[entry.name] = bytes_digest(data)
            return data
        if (matrix := self._matrices.get(entry.name)) is None:
            return self._waiting.pop(entry.name)
        recipe = self._chosen[matrix.component].recipe
        quantized = self._store.quantized(matrix.component, recipe, matrix.factors)
        if isinstance(matrix.factors, float) and matrix.factors == 1.0:
            self._weights[matrix.name] = quantized.digest
        arranged = replace(quantized, data=matrix.arranged(quantized.data), shape=matrix.shape)
        data, more = recipe.grid.pack(arranged), _scales_and_biases(matrix, quantized)
        self._digests[matrix.name] = bytes_digest(data, *more)
        self._waiting |= {f"{matrix.name}.{part}": raw for part, raw in zip(PARTS[1:], more, strict=False)}
        return data

    def records(self) -> tuple[ExportedTensor, ...]:
        """After all bytes were given."""
        sizes: Counter[str] = Counter()
        for entry in self.entries:
            owner, _, part = entry.name.rpartition(".")
            whole = part in PARTS and f"{owner}.weight" in self._matrices
            sizes[owner if whole else entry.name] += entry.bytes
        records = []
        for matrix in self._layout.matrices:
            choice, name = self._chosen[matrix.component], f"{matrix.name}.weight"
            stored = (
                sizes[matrix.name],
                choice.reason,
                self._digests[matrix.name],
                self._weights.get(matrix.name, ""),
            )
            records.append(ExportedTensor(matrix.component, name, choice.planned, choice.recipe, *stored))
        for name, component in self._layout.sources.items():
            kind = "fp32" if name in self._layout.full_precision else FP16
            records.append(
                ExportedTensor(component or name, name, FP16, kind, sizes[name], None, self._digests[name])
            )
        return tuple(records)


def _scales_and_biases(matrix: Matrix, quantized: Quantized) -> list[npt.NDArray[np.uint8]]:
    parts = (quantized.scales, quantized.zero_points)
    return [_raw(matrix.arranged(part).cpu().numpy()) for part in parts if part is not None]


def _raw(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
