"""Statistics as files: `RUN/statistics/statistics.json` describes them, `*.safetensors` hold the moments.

A file holds the components finished with one block, as upper triangles in float32; components with the same inputs (q,
k and v of one attention) share one. Files are written atomically.

The second moments of every component's inputs are gathered block by block: all windows go through a block before the
next begins, so memory holds the states of all windows and the moments of one block (and of weights that later blocks
share). An interrupted gathering is resumed. Hooks on modules miss projections that a model multiplies by their weight
(Mamba-1's `dt_proj`) and experts that are slices of one parameter. So the products themselves are watched: if an
operand lies in a weight's memory, the other operand holds its inputs.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kl_lens.base.errors import CheckpointError, FormatError, RunError, UnlearntError
from kl_lens.base.files import whole, write_text
from kl_lens.model import LoadedModel, States
from kl_lens.model.anatomy import ProductWatch
from kl_lens.model.chain import BlockCalls
from kl_lens.run.records import Component
from kl_lens.text.windows import Windows
from kl_lens.weights.quantizers import InputStatistics

FOLDER = "statistics"
# Raise it, with the reason, when the same text gives other statistics.
VERSION = 1
_INDEX = "statistics.json"

# What the numbers depend on, and what a difference means.
_MEANINGS = {
    "version": "another version of KL Lens",
    "model_fingerprint": "another model",
    "text_fingerprint": "another text",
}

LOOKED_UP = "a lookup table, not a matrix product: all columns count equally"
NO_INPUT = "its inputs were all zero on this text: all columns count equally"


class StoredStatistics:
    """The second moments of every component's inputs on one text: a `weights.Statistics`."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        components: dict[str, dict[str, Any]],
    ) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self._components = components

    @classmethod
    def open(cls, run: Path, model: LoadedModel) -> StoredStatistics:
        """The statistics of a run. Raises if they are of another model, or not complete."""
        stored = cls.held_by(run)
        if stored is None:
            name = model.source or model.name
            raise UnlearntError(
                f"{run} has no statistics to learn from; gather them with: kl-lens calibrate {name} --run {run}"
            )
        stored._require({"version": VERSION, "model_fingerprint": model.fingerprint})
        if missing := stored._missing(model):
            raise RunError(
                f"{stored.folder}: gathering stopped before {missing[0]} (and {len(missing) - 1} more); continue with: "
                f"kl-lens calibrate --run {run}"
            )
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
            raise RunError(
                f"{path} cannot be read: {error}; delete {folder} and gather again"
            ) from error

    @classmethod
    def begun(cls, run: Path, model: LoadedModel, windows: Windows) -> StoredStatistics:
        """The existing statistics of this model and text, to add to."""
        identity = {
            "version": VERSION,
            "model": model.name,
            "model_fingerprint": model.fingerprint,
            "text": windows.provenance(),
            "text_fingerprint": windows.fingerprint,
        }
        stored = cls.held_by(run)
        if stored is None:
            return cls(run / FOLDER, identity, {})
        stored._require(identity)
        intact = {
            name: entry
            for name, entry in stored._components.items()
            if stored._is_readable(name)
        }
        return cls(stored.folder, identity, intact)

    def covers(self, model: LoadedModel) -> bool:
        """Whether every component of the model is there."""
        return not self._missing(model)

    def _missing(self, model: LoadedModel) -> list[str]:
        return [
            c.name for c in model.anatomy.candidates if c.name not in self._components
        ]

    @property
    def digest(self) -> str:
        parts = [self.identity[name] for name in _MEANINGS if name in self.identity]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    @property
    def notes(self) -> dict[str, str]:
        """Component → remark about its statistics."""
        return {
            name: entry["note"]
            for name, entry in self._components.items()
            if entry.get("note")
        }

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
                raise FormatError(
                    f"{component}: {entry['note']}; use a method that needs no statistics"
                )
            return InputStatistics(torch.eye(entry["columns"], device=device), tokens)
        try:
            with safe_open(self.folder / entry["file"], framework="pt") as file:
                packed = file.get_tensor(entry["under"])
        except (OSError, SafetensorError) as error:
            raise FormatError(
                f"{self.folder / entry['file']} is damaged; delete it and gather again"
            ) from error
        return InputStatistics(_unpacked(packed.to(device), entry["columns"]), tokens)

    def add(self, file: str, finished: Sequence[Finished]) -> None:
        """Writes finished components to a file, then to the index."""
        tensors: dict[str, Tensor] = {}
        for entry in sorted(finished, key=lambda entry: entry.moments is not None):
            under = None
            if entry.moments is not None:
                packed = _packed(entry.moments)
                equal = (name for name, t in tensors.items() if torch.equal(t, packed))
                under = next(equal, entry.name)
                tensors.setdefault(under, packed)
            self._components[entry.name] = {
                "file": file if under else None,
                "under": under,
                "columns": entry.columns,
                "tokens": entry.tokens,
                "note": entry.note,
            }
        if tensors:
            with whole(self.folder / file) as temporary:
                save_file(tensors, temporary)
        index = {
            "identity": self.identity,
            "digest": self.digest,
            "components": self._components,
        }
        write_text(self.folder / _INDEX, json.dumps(index, indent=1) + "\n")

    def _require(self, identity: Mapping[str, Any]) -> None:
        for key, meaning in _MEANINGS.items():
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


@dataclass(frozen=True)
class Finished:
    """One component's statistics. Without moments all columns count equally, or nothing is known (no columns)."""

    name: str
    moments: Tensor | None
    columns: int | None
    tokens: list[int]
    note: str | None = None


def _packed(moments: Tensor) -> Tensor:
    row, column = torch.triu_indices(*moments.shape[-2:], device=moments.device)
    return moments[..., row, column].contiguous().cpu()


def _unpacked(packed: Tensor, columns: int) -> Tensor:
    row, column = torch.triu_indices(columns, columns, device=packed.device)
    full = packed.new_empty(*packed.shape[:-1], columns, columns)
    full[..., row, column] = packed
    full[..., column, row] = packed
    return full


def gather(
    model: LoadedModel,
    windows: Windows,
    run: Path,
    *,
    progress: Callable[[int, int], None] = lambda finished, blocks: None,
) -> StoredStatistics:
    """The statistics of all quantizable components on these windows, in `statistics/` of the run folder.

    An earlier call is resumed. `progress` gets (blocks done, blocks). Raises RunError if the folder holds statistics of
    another model or text, CheckpointError if activations are not finite.
    """
    stored = StoredStatistics.begun(run, model, windows)
    missing = [c for c in model.anatomy.candidates if c.name not in stored]
    if missing:
        with _experts_one_by_one(model.model):
            _Gathering(model, windows, stored, missing).run(progress)
    return stored


@dataclass(frozen=True)
class _Gathering:
    model: LoadedModel
    windows: Windows
    stored: StoredStatistics
    missing: Sequence[Component]
    moments: dict[str, Moments] = field(default_factory=dict)

    @cached_property
    def _batches(self) -> tuple[Tensor, ...]:
        task = self.model.chain.task
        return self.windows.ids.split(max(1, task.rows_at_once // self.windows.length))

    def run(self, progress: Callable[[int, int], None]) -> None:
        chain = self.model.chain
        calls = [chain.calls(ids) for ids in self._batches]
        states = [States(call.hidden) for call in calls]
        for index, block in enumerate(chain.blocks):
            with self.model.present(block):
                watch = self._watch([c for c in self.missing if index in c.blocks])
                for number, call in enumerate(calls):
                    with watch:
                        states[number] = chain.run(states[number], call, index, index + 1)
                    hidden = states[number].hidden
                    self._check_states(hidden, f"after block {index}", number)
                complete = [c for c in self.missing if c.blocks and c.blocks[-1] == index]
                self._store(f"block-{index:03d}.safetensors", complete)
            progress(index + 1, len(chain))
        with self.model.present(self.model.model):
            self._outside(calls, states)

    def _outside(self, calls: Sequence[BlockCalls], states: Sequence[States]) -> None:
        """The head and other components outside the blocks."""
        anatomy = self.model.anatomy
        outside = [c for c in self.missing if not c.blocks]
        looked_up = [c for c in outside if c.name == anatomy.embedding != anatomy.head]
        multiplied = [c for c in outside if c not in looked_up]
        watch = self._watch(multiplied)
        for number, (call, state) in enumerate(zip(calls, states, strict=True)):
            with watch:
                final = self.model.chain.finish(state, call)  # stops before the head
            self._check_states(final, "before the head", number)
            if anatomy.head in self.moments:
                self.moments[anatomy.head].add(final)
        file = "outside.safetensors"
        self._store(file, multiplied)
        tokens = [self.windows.tokens]
        self.stored.add(
            file,
            [Finished(c.name, None, c.shape[-1], tokens, LOOKED_UP) for c in looked_up],
        )

    def _watch(self, components: Sequence[Component]) -> ProductWatch:
        """Within, every product with one of these weights adds its inputs to that weight's moments."""
        weights = {c.name: self.model.tensor(c.weight) for c in components}
        for name, weight in weights.items():
            self.moments.setdefault(name, Moments(weight.shape, weight.device))
        ordered = sorted((weight.data_ptr(), name) for name, weight in weights.items())
        starts = [start for start, _ in ordered]

        def see(matrix: Tensor, inputs: Tensor) -> None:
            index = bisect.bisect_right(starts, matrix.data_ptr()) - 1
            if index < 0:
                return
            start, name = ordered[index]
            weight = weights[name]
            moments = self.moments[name]
            offset = (matrix.data_ptr() - start) // weight.element_size()
            if offset >= weight.numel() or matrix.dtype != weight.dtype:
                return
            size = math.prod(weight.shape[-2:])
            expert, within = divmod(offset, size)
            is_one = within + matrix.numel() <= size
            if is_one and matrix.shape[-1] == inputs.shape[-1] == moments.columns:
                moments.add(inputs, expert)
            else:
                moments.in_parts = True

        return ProductWatch(see)

    def _store(self, file: str, components: Sequence[Component]) -> None:
        finished = [self._finished(c.name, self.moments.pop(c.name)) for c in components]
        self.stored.add(file, finished)

    def _finished(self, name: str, moments: Moments) -> Finished:
        tokens = moments.tokens
        if moments.in_parts:
            return Finished(name, None, None, [0], "used only in parts")
        if not any(tokens):
            unused = "never used in a matrix product"
            if moments.stacked:
                unused = "no token of this text was routed to its experts"
            return Finished(name, None, None, [0], unused)
        if not bool(moments.sums.any()):
            return Finished(name, None, moments.columns, [sum(tokens)], NO_INPUT)
        if not bool(torch.isfinite(moments.sums).all()):
            raise CheckpointError(
                f"{name}: its inputs are too large to square; load it in float32"
            )
        few = [str(e) for e, n in enumerate(tokens) if n < moments.columns]
        filled = f"experts {', '.join(few)} saw fewer tokens than they have columns: filled up with the overall mean"
        note = filled if few and moments.stacked else None
        return Finished(name, moments.means, moments.columns, tokens, note)

    def _check_states(self, states: Tensor, position: str, number: int) -> None:
        finite = torch.isfinite(states).flatten(1).all(1)
        if not bool(finite.all()):
            before = sum(map(len, self._batches[:number]))
            window = before + int((~finite).nonzero()[0, 0])
            raise CheckpointError(
                f"{self.model.name}: states {position} hold NaN or infinity in window {window}; "
                "repair the checkpoint, or load it in float32"
            )


@contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """Makes transformers multiply with each expert's slice; its faster ways copy the experts."""
    before = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if before in (None, "eager") or not hasattr(model, "set_experts_implementation"):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


class Moments:
    """Sums of x xᵀ over the inputs of one weight, per expert.

    Each product is float32; sums are float64, so that many windows cost no precision.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self.columns = shape[-1]
        self.stacked = len(shape) == 3
        experts = shape[0] if self.stacked else 1
        self.sums = torch.zeros(
            experts, self.columns, self.columns, dtype=torch.float64, device=device
        )
        self.tokens = [0] * experts
        # A product used only some of the columns: the moments are incomplete.
        self.in_parts = False

    def add(self, inputs: Tensor, expert: int = 0) -> None:
        """Adds inputs of shape (…, columns)."""
        rows = inputs.reshape(-1, self.columns).float()
        self.sums[expert] += rows.T @ rows
        self.tokens[expert] += rows.shape[0]

    @property
    def means(self) -> Tensor:
        """E[x xᵀ] in float32; an expert with fewer tokens than columns is filled up with the mean over all experts."""
        tokens = self.sums.new_tensor(self.tokens)[:, None, None]
        if not self.stacked:
            return (self.sums / tokens).float()[0]
        overall = self.sums.sum(0) / tokens.sum()
        lacking = (self.columns - tokens).clamp_min(0)
        return ((self.sums + lacking * overall) / (tokens + lacking)).float()
