"""Statistics as files: `RUN/statistics/statistics.json` describes them, `*.safetensors` hold the moments.

A file holds the components finished with one block, as upper triangles in float32; components with the same inputs (q,
k and v of one attention) share one. Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kl_lens.base.errors import FormatError, RunError, UnlearntError
from kl_lens.base.files import whole, write_text
from kl_lens.model import LoadedModel
from kl_lens.text import Windows
from kl_lens.weights.quantizers import InputStatistics

FOLDER = "statistics"
# Raise it, with the reason, when the same text gives other statistics.
VERSION = 1
_INDEX = "statistics.json"

LOOKED_UP = "a lookup table, not a matrix product: all columns count equally"
NO_INPUT = "its inputs were all zero on this text: all columns count equally"


class StoredStatistics:
    """The second moments of every component's inputs on one text: a `weights.Statistics`.

    Example:
        >>> statistics = StoredStatistics.open(run.folder, model)
        >>> model.weights.learn_from(statistics)
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], components: dict[str, dict[str, Any]]
    ) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self._components = components

    @classmethod
    def open(cls, run: Path, model: LoadedModel) -> StoredStatistics:
        """The statistics of a run. Raises if they are of another model, or not complete."""
        stored = cls.of_fingerprint(run, model.fingerprint, model.source or model.name)
        if missing := stored._missing(model):
            raise RunError(
                f"{stored.folder}: gathering stopped before {missing[0]} (and {len(missing) - 1} more); continue with: "
                f"kl-lens calibrate --run {run}"
            )
        return stored

    @classmethod
    def of_fingerprint(cls, run: Path, fingerprint: str | None, name: str = "MODEL") -> StoredStatistics:
        """The statistics of a run, for a model that need not be opened. Raises if they are of another one."""
        stored = cls.held_by(run)
        if stored is None:
            raise UnlearntError(
                f"{run} has no statistics to learn from; gather them with: kl-lens calibrate {name} --run {run}"
            )
        stored._require({"version": VERSION, "model_fingerprint": fingerprint})
        return stored

    @classmethod
    def held_by(cls, run: Path) -> StoredStatistics | None:
        """The statistics of a run, complete or not, of any model."""
        folder = run / FOLDER
        path = folder / _INDEX
        if not path.is_file():
            return None
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            return cls(folder, index["identity"], index["components"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be read: {error}; delete {folder} and gather again") from error

    @classmethod
    def begun(cls, run: Path, model: LoadedModel, windows: Windows) -> StoredStatistics:
        """The existing statistics of this model and text, to add to."""
        identity = {
            "version": VERSION, "model": model.name, "model_fingerprint": model.fingerprint,
            "text": windows.provenance(), "text_fingerprint": windows.fingerprint,
        }  # fmt: skip
        stored = cls.held_by(run)
        if stored is None:
            return cls(run / FOLDER, identity, {})
        stored._require(identity)
        intact = {name: entry for name, entry in stored._components.items() if stored._is_readable(name)}
        return cls(stored.folder, identity, intact)

    def covers(self, model: LoadedModel) -> bool:
        """Whether every component of the model is there."""
        return not self._missing(model)

    def _missing(self, model: LoadedModel) -> list[str]:
        return [c.name for c in model.anatomy.candidates if c.name not in self._components]

    @property
    def digest(self) -> str:
        names = ("version", "model_fingerprint", "text_fingerprint")
        parts = [self.identity[name] for name in names if name in self.identity]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    @property
    def notes(self) -> dict[str, str]:
        """Component → remark about its statistics."""
        return {name: entry["note"] for name, entry in self._components.items() if entry.get("note")}

    def __contains__(self, component: str) -> bool:
        return component in self._components

    def of(self, component: str, device: torch.device | str = "cpu") -> InputStatistics:
        entry = self._components.get(component)
        if entry is None:
            raise FormatError(
                f"{component}: {self.folder} has no statistics of it; gather them again with this model"
            )
        tokens = tuple(entry["tokens"])
        if entry["file"] is None:
            if entry["columns"] is None:
                raise FormatError(f"{component}: {entry['note']}; use a method that needs no statistics")
            return InputStatistics(torch.eye(entry["columns"], device=device), tokens)
        try:
            with safe_open(self.folder / entry["file"], framework="pt") as file:
                packed = file.get_tensor(entry["under"])
        except (OSError, SafetensorError) as error:
            raise FormatError(
                f"{self.folder / entry['file']} is damaged; delete it and gather again"
            ) from error
        return InputStatistics(_unpacked(packed.to(device), entry["columns"]), tokens)

    def add(self, file: str, moments: Mapping[str, InputStatistics], notes: Mapping[str, str]) -> None:
        """Writes finished components to a file, then to the index."""
        tensors: dict[str, torch.Tensor] = {}
        for name, statistics in moments.items():
            packed = _packed(statistics.second_moments)
            same = (other for other, tensor in tensors.items() if torch.equal(tensor, packed))
            under = next(same, name)
            if under == name:
                tensors[name] = packed
            self._components[name] = {
                "file": file, "under": under, "columns": statistics.second_moments.shape[-1],
                "tokens": list(statistics.tokens), "note": notes.get(name),
            }  # fmt: skip
        if tensors:
            with whole(self.folder / file) as temporary:
                save_file(tensors, temporary)
        self._write_index()

    def add_without_moments(self, component: str, note: str, columns: int | None, tokens: int) -> None:
        """Records a component whose columns count equally (`columns` given), or about which nothing is known (None)."""
        entry = {"file": None, "under": None, "columns": columns, "tokens": [tokens], "note": note}
        self._components[component] = entry
        self._write_index()

    def _require(self, identity: Mapping[str, Any]) -> None:
        meanings = {
            "version": "another version of KL Lens",
            "model_fingerprint": "another model",
            "text_fingerprint": "another text",
        }
        for key, meaning in meanings.items():
            if key in identity and self.identity.get(key) != identity[key]:
                raise RunError(
                    f"{self.folder} holds statistics of {meaning} ({self.identity.get('model')}, "
                    f"{self.identity.get('text', {}).get('source')}); delete it to gather again, or use another --run"
                )

    def _is_readable(self, component: str) -> bool:
        try:
            self.of(component)
        except FormatError:
            return self._components[component]["file"] is None
        return True

    def _write_index(self) -> None:
        index = {"identity": self.identity, "digest": self.digest, "components": self._components}
        write_text(self.folder / _INDEX, json.dumps(index, indent=1) + "\n")


def _packed(moments: torch.Tensor) -> torch.Tensor:
    row, column = torch.triu_indices(*moments.shape[-2:], device=moments.device)
    return moments[..., row, column].contiguous().cpu()


def _unpacked(packed: torch.Tensor, columns: int) -> torch.Tensor:
    row, column = torch.triu_indices(columns, columns, device=packed.device)
    full = packed.new_empty(*packed.shape[:-1], columns, columns)
    full[..., row, column] = packed
    full[..., column, row] = packed
    return full
