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
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kl_lens.base.errors import CheckpointError, FormatError, RunError, UnlearntError
from kl_lens.base.files import whole, write_text
from kl_lens.model import LoadedModel, States
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

    def add(
        self, file: str, moments: Mapping[str, InputStatistics], notes: Mapping[str, str]
    ) -> None:
        """Writes finished components to a file, then to the index."""
        tensors: dict[str, Tensor] = {}
        for name, statistics in moments.items():
            packed = _packed(statistics.second_moments)
            equal = (
                earlier
                for earlier, tensor in tensors.items()
                if torch.equal(tensor, packed)
            )
            under = next(equal, name)
            if under == name:
                tensors[name] = packed
            self._components[name] = {
                "file": file,
                "under": under,
                "columns": statistics.second_moments.shape[-1],
                "tokens": list(statistics.tokens),
                "note": notes.get(name),
            }
        if tensors:
            with whole(self.folder / file) as temporary:
                save_file(tensors, temporary)
        self._write_index()

    def add_without_moments(
        self, component: str, note: str, columns: int | None, tokens: int
    ) -> None:
        """Records a component whose columns count equally (`columns` given), or about which nothing is known (None)."""
        self._components[component] = {
            "file": None,
            "under": None,
            "columns": columns,
            "tokens": [tokens],
            "note": note,
        }
        self._write_index()

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

    def _write_index(self) -> None:
        index = {
            "identity": self.identity,
            "digest": self.digest,
            "components": self._components,
        }
        write_text(self.folder / _INDEX, json.dumps(index, indent=1) + "\n")


def _packed(moments: Tensor) -> Tensor:
    row, column = torch.triu_indices(*moments.shape[-2:], device=moments.device)
    return moments[..., row, column].contiguous().cpu()


def _unpacked(packed: Tensor, columns: int) -> Tensor:
    row, column = torch.triu_indices(columns, columns, device=packed.device)
    full = packed.new_empty(*packed.shape[:-1], columns, columns)
    full[..., row, column] = packed
    full[..., column, row] = packed
    return full


_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")


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


class _Gathering:
    def __init__(
        self,
        model: LoadedModel,
        windows: Windows,
        stored: StoredStatistics,
        missing: Sequence[Component],
    ) -> None:
        self._model = model
        self._chain = model.chain
        self._stored = stored
        self._missing = missing
        self._tokens = windows.tokens
        size = max(1, self._chain.task.rows_at_once // windows.length)
        self._batches = windows.ids.split(size)
        self._moments: dict[str, Moments] = {}

    def run(self, progress: Callable[[int, int], None]) -> None:
        calls = [self._chain.calls(ids) for ids in self._batches]
        states = [States(call.hidden) for call in calls]
        for index, block in enumerate(self._chain.blocks):
            with self._model.present(block):
                watch = self._watch([c for c in self._missing if index in c.blocks])
                for number, call in enumerate(calls):
                    with watch:
                        states[number] = self._chain.run(
                            states[number], call, index, index + 1
                        )
                    self._check_states(
                        states[number].hidden, f"after block {index}", number
                    )
                complete = [
                    c for c in self._missing if c.blocks and c.blocks[-1] == index
                ]
                self._store(f"block-{index:03d}.safetensors", complete)
            progress(index + 1, len(self._chain))
        with self._model.present(self._model.model):
            self._outside(calls, states)

    def _outside(self, calls: Sequence[BlockCalls], states: Sequence[States]) -> None:
        """The head and other components outside the blocks."""
        anatomy = self._model.anatomy
        outside = [c for c in self._missing if not c.blocks]
        looked_up = [c for c in outside if c.name == anatomy.embedding != anatomy.head]
        multiplied = [c for c in outside if c not in looked_up]
        watch = self._watch(multiplied)
        for number, (call, state) in enumerate(zip(calls, states, strict=True)):
            with watch:
                final = self._chain.finish(state, call)  # stops before the head
            self._check_states(final, "before the head", number)
            if anatomy.head in self._moments:
                self._moments[anatomy.head].add(final)
        self._store("outside.safetensors", multiplied)
        for component in looked_up:
            self._stored.add_without_moments(
                component.name, LOOKED_UP, component.shape[-1], self._tokens
            )

    def _watch(self, components: Sequence[Component]) -> ProductWatch:
        for component in components:
            if component.name not in self._moments:
                self._moments[component.name] = Moments(
                    component.shape, self._chain.device
                )
        watched = {c.name: self._moments[c.name] for c in components}
        return ProductWatch(
            {c.name: self._model.tensor(c.weight) for c in components}, watched
        )

    def _store(self, file: str, components: Sequence[Component]) -> None:
        statistics: dict[str, InputStatistics] = {}
        notes: dict[str, str] = {}
        for name in (c.name for c in components):
            moments = self._moments.pop(name)
            if moments.in_parts:
                self._stored.add_without_moments(name, "used only in parts", None, 0)
            elif not any(moments.tokens):
                unused = "never used in a matrix product"
                note = (
                    "no token of this text was routed to its experts"
                    if moments.stacked
                    else unused
                )
                self._stored.add_without_moments(name, note, None, 0)
            elif not bool(moments.sums.any()):
                self._stored.add_without_moments(
                    name, NO_INPUT, moments.columns, sum(moments.tokens)
                )
            else:
                statistics[name] = InputStatistics(moments.means, tuple(moments.tokens))
                if not bool(torch.isfinite(moments.sums).all()):
                    raise CheckpointError(
                        f"{name}: its inputs are too large to square; load it in float32"
                    )
                few = [
                    str(e) for e, n in enumerate(moments.tokens) if n < moments.columns
                ]
                if few and moments.stacked:
                    notes[name] = (
                        f"experts {', '.join(few)} saw fewer tokens than they have columns: filled up with the overall "
                        "mean"
                    )
        self._stored.add(file, statistics, notes)

    def _check_states(self, states: Tensor, position: str, number: int) -> None:
        finite = torch.isfinite(states).flatten(1).all(1)
        if not bool(finite.all()):
            window = sum(map(len, self._batches[:number])) + int(
                (~finite).nonzero()[0, 0]
            )
            raise CheckpointError(
                f"{self._model.name}: states {position} hold NaN or infinity in window {window}; "
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
        self.in_parts = (
            False  # a product used only some of the columns: the moments are incomplete
        )

    def add(self, inputs: Tensor, expert: int = 0) -> None:
        """Adds inputs of shape (…, columns)."""
        rows = inputs.reshape(-1, self.columns).float()
        self.sums[expert] += rows.T @ rows
        self.tokens[expert] += rows.shape[0]

    @property
    def means(self) -> Tensor:
        """E[x xᵀ] in float32; an expert with fewer tokens than columns is filled up with the mean over all experts."""
        tokens = torch.tensor(self.tokens, dtype=torch.float64, device=self.sums.device)[
            :, None, None
        ]
        overall = self.sums.sum(0) / tokens.sum()
        lacking = (
            (self.columns - tokens).clamp_min(0)
            if self.stacked
            else torch.zeros_like(tokens)
        )
        means = ((self.sums + lacking * overall) / (tokens + lacking)).float()
        return means if self.stacked else means[0]


class ProductWatch(TorchFunctionMode):
    """Within the block, every product with a watched weight adds its inputs to that weight's moments."""

    def __init__(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Moments]
    ) -> None:
        super().__init__()
        self._moments = moments
        ordered = sorted(
            (weights[name].data_ptr(), name, weights[name]) for name in moments
        )
        self._starts = [start for start, _, _ in ordered]
        self._weights = [(name, weight) for _, name, weight in ordered]

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "linear" and len(args) > 1:
            self._see(args[0], args[1], transposed=False)
        elif name in _PRODUCTS and len(args) > 1:
            first = args[0]
            second = args[1]
            # weight · x: the inputs are the columns of x; x · weightᵀ: its rows.
            if not self._see(
                second.mT if second.dim() > 1 else second, first, transposed=False
            ):
                self._see(first, second, transposed=True)
        return func(*args, **(kwargs or {}))

    def _see(self, inputs: Tensor, operand: Tensor, *, transposed: bool) -> bool:
        """Adds the inputs if the operand is (part of) a watched weight, (rows, columns) or its transpose."""
        owner = self._owner(operand)
        if owner is None:
            return False
        name, expert = owner
        moments = self._moments[name]
        matrix = operand.mT if transposed else operand
        if (
            matrix.shape[-1] != moments.columns
            or inputs.shape[-1] != moments.columns
            or expert is None
        ):
            moments.in_parts = True
        else:
            moments.add(inputs, expert)
        return True

    def _owner(self, operand: Tensor) -> tuple[str, int | None] | None:
        """The weight whose memory holds the operand, and its expert (None: not one whole expert)."""
        at = operand.data_ptr()
        index = bisect.bisect_right(self._starts, at) - 1
        if index < 0:
            return None
        name, weight = self._weights[index]
        offset = (at - self._starts[index]) // weight.element_size()
        if offset >= weight.numel() or operand.dtype != weight.dtype:
            return None
        size = math.prod(weight.shape[-2:])
        expert = offset // size
        return name, expert if offset + operand.numel() <= (expert + 1) * size else None
