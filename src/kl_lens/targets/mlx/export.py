"""Writes a plan as a folder that `mlx_lm.load` opens as it is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.digests import bytes_digest
from kl_lens.base.errors import TargetError
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.exporting import Choice, Entry, file_size, record, write_beside, write_file
from kl_lens.targets.mlx.configuration import CONFIG_FILE
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.recipes import FP16

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.mlx.layout import Layout, Matrix
    from kl_lens.weights.store import WeightStore

WEIGHT_FILE, FORMAT = "model.safetensors", "mlx"
PARTS = ("weight", "scales", "biases")  # of a quantized matrix
_FLOATS = {"F16": np.float16, "F32": np.float32}


def export(
    model: LoadedModel, plan: Plan, layout: Layout, chosen: dict[str, Choice], folder: Path
) -> Artifact:
    """Everything that is not quantized is float16, as after `mlx_lm.convert --dtype float16`."""
    file = _File(layout, chosen, model.weights)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / WEIGHT_FILE, file.entries, FORMAT, file.bytes_of)
    config = layout.config | quantization(layout, chosen)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    notes = write_beside(model, folder)
    if model.tokenizer is None:
        notes = ["mlx_lm.load wants a tokenizer, and the checkpoint has none; kl-lens opens the folder"]
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    return record("mlx", model, plan, folder, file.records(), versions=versions, notes=notes)


def file_bytes(model: LoadedModel, layout: Layout, chosen: dict[str, Choice]) -> int:
    """The exact size of the file that `export` would write, without quantizing anything."""
    return file_size(_File(layout, chosen, model.weights).entries, FORMAT)


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
        self._matrices = {f"{matrix.name}.weight": matrix for matrix in layout.matrices}
        # Scales and biases, which come after all matrices.
        self._waiting: dict[str, npt.NDArray[np.uint8]] = {}
        # Matrix or other tensor → its bytes, their digest, and the digest in the weight store.
        self._stored: dict[str, tuple[int, str, str]] = {}
        entries = [entry for matrix in layout.matrices for entry in self._entries(matrix)]
        for name, value in layout.values.items():
            entries.append(Entry(name, "F32" if name in layout.full_precision else "F16", value.shape))
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
                raise TargetError(f"{entry.name}: has values that {entry.dtype} cannot hold; rescale it")
            data = _raw(value)
            self._stored[entry.name] = data.nbytes, bytes_digest(data), ""
            return data
        if (matrix := self._matrices.get(entry.name)) is None:
            return self._waiting.pop(entry.name)
        recipe = self._chosen[matrix.component].recipe
        quantized = self._store.quantized(matrix.component, recipe, matrix.factors)
        own = isinstance(matrix.factors, float) and matrix.factors == 1.0
        data = recipe.grid.pack(replace(quantized, data=matrix.arranged(quantized.data), shape=matrix.shape))
        parts = (quantized.scales, quantized.zero_points)
        more = [_raw(matrix.arranged(part).cpu().numpy()) for part in parts if part is not None]
        size, digest = data.nbytes + sum(raw.nbytes for raw in more), bytes_digest(data, *more)
        self._stored[entry.name] = size, digest, quantized.digest if own else ""
        self._waiting |= {f"{matrix.name}.{part}": raw for part, raw in zip(PARTS[1:], more, strict=False)}
        return data

    def records(self) -> list[ExportedTensor]:
        """After all bytes were given."""
        records = []
        for name, matrix in self._matrices.items():
            choice, (size, digest, weights) = self._chosen[matrix.component], self._stored[name]
            what = matrix.component, name, choice.planned, choice.recipe
            records.append(ExportedTensor(*what, size, choice.reason, digest, weights))
        for name, component in self._layout.sources.items():
            kind = "fp32" if name in self._layout.full_precision else FP16
            size, digest, _ = self._stored[name]
            records.append(ExportedTensor(component or name, name, FP16, kind, size, None, digest))
        return records


def _raw(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
