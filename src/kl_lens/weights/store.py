"""The weight store: the only caller of quantizers.

Measuring, exporting, evaluating and timing all take their weights from here, so they cannot differ. Results of
expensive methods are cached on disk if the store has a folder.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kl_lens.base.accelerators import on_host
from kl_lens.base.errors import FormatError, UnlearntError
from kl_lens.base.files import bytes_digest, tensor_digest, whole
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.scales import scales_of, with_scales
from kl_lens.weights.quantizers import TUNED, InputStatistics
from kl_lens.weights.recipes import Recipe

DISK_BUDGET = 4 * 10**9
MEMORY_BUDGET = 256 << 20
_EXPERTS = 4  # that show what all lose
_ROWS_AT_ONCE = 1 << 24  # weights converted to float32 at a time
Factors = float | Tensor  # one factor, or (rows, 1)


class WeightSource(Protocol):
    """A model's weights by component: in memory, or read from disk one by one."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def weight(self, component: str) -> Tensor:
        """The component's weight, (…, rows, columns), in its own type and on its own device."""

    def state(self, component: str) -> Hashable:
        """Changes whenever the weight changes."""


class Statistics(Protocol):
    """Statistics of every component's inputs."""

    @property
    def digest(self) -> str:
        """Of text, model and version; identifies what a recipe learned from."""

    def of(self, component: str, device: torch.device | str = "cpu") -> InputStatistics:
        """Raises FormatError if there are no usable statistics of the component."""


class WeightStore:
    """Quantized weights of one model."""

    def __init__(
        self,
        source: WeightSource,
        statistics: Statistics | Callable[[], Statistics] | None = None,
        folder: Path | None = None,
        disk_budget: int = DISK_BUDGET,
    ) -> None:
        """`folder`: where expensive results are cached."""
        self._source = source
        self._statistics = statistics
        self._disk = self._tuned = None
        if folder is not None:
            self._disk = DiskCache(folder, disk_budget)
            self._tuned = DiskCache(folder.parent / TUNED, sys.maxsize)
        self._recent: OrderedDict[tuple[Hashable, ...], Quantized] = OrderedDict()
        self._recent_bytes = 0
        # (component, recipe or None for the original, state of the weight) → digest.
        self._digests: dict[tuple[Hashable, ...], str] = {}
        self._last: tuple[tuple[str, Statistics], InputStatistics] | None = None

    def learn_from(self, statistics: Statistics) -> None:
        """Sets the statistics for methods that learn."""
        self._statistics = statistics

    def learnt_by(
        self, recipes: Iterable[Recipe], expected: str | None = None
    ) -> str | None:
        """The digest of the statistics these recipes use; None if no recipe learns.

        Raises if there are none, or others than expected.
        """
        recipe = next((recipe for recipe in recipes if recipe.quantizer.learns), None)
        if recipe is None:
            return None
        digest = self._learnt_from(recipe).digest
        if expected not in (None, digest):
            raise FormatError(
                f"{recipe}: the plan was made with statistics {expected}, but the run has {digest}; make the "
                "plan again, or restore the old statistics"
            )
        return digest

    def output_error(
        self, component: str, recipe: Recipe, rows: int | None = None
    ) -> float:
        """E‖(W − Q) x‖² over the calibration inputs x: the error of the component's outputs.

        `rows`: estimated from so many rows, evenly spread, of a few experts. All quantizers treat rows independently.
        """
        weight = self._source.weight(component).detach()
        count = weight.numel()
        experts = None
        if rows is not None and rows < weight.shape[-2]:
            if weight.dim() == 3:
                experts = _spread(_EXPERTS, weight, 0)
                weight = weight[experts]
            weight = weight[..., _spread(rows, weight, -2), :].float()
            quantized = self._rounded(weight, component, recipe, experts)
            values = recipe.grid.dequantize(quantized)
        else:
            values = self.values(component, recipe)
        moments = self._inputs(recipe, component, experts).second_moments
        step = max(1, _ROWS_AT_ONCE * weight.shape[-2] // weight.numel())
        total = 0.0
        parts = (weight.split(step, -2), values.split(step, -2))
        for before, after in zip(*parts, strict=True):
            errors = before.float() - after
            total += float(((errors @ moments) * errors).sum(dtype=torch.float64))
        return total / (weight.numel() / count)

    def _bound(self, recipe: Recipe) -> str:
        """The recipe with the digest of its statistics; raises if there are none."""
        if not recipe.quantizer.learns:
            return recipe
        return f"{recipe}@{self._learnt_from(recipe).digest}"

    def _learnt_from(self, recipe: Recipe) -> Statistics:
        if self._statistics is None:
            raise UnlearntError(
                f"{recipe}: {recipe.method} needs statistics and this model has none; gather them with: "
                "kl-lens calibrate MODEL --run DIR (in Python: Study.calibrate)"
            )
        if callable(self._statistics):  # opened on first use
            self._statistics = self._statistics()
        return self._statistics

    def _inputs(
        self, recipe: Recipe, component: str, experts: Tensor | None = None
    ) -> InputStatistics:
        """Of all experts or some, on the weights' device; kept until another component's are wanted: its recipes come
        one after another."""
        key = (component, self._learnt_from(recipe))
        if self._last is None or self._last[0] != key:
            self._last = None  # two would not fit
            self._last = (key, key[1].of(component, self._source.device))
        inputs = self._last[1]
        if experts is None or inputs.second_moments.dim() == 2:
            return inputs
        tokens = tuple(inputs.tokens[expert] for expert in experts.tolist())
        return InputStatistics(inputs.second_moments[experts], tokens)

    def quantized(
        self, component: str, recipe: Recipe, factors: Factors = 1.0
    ) -> Quantized:
        """The quantized component; `factors` are multiplied with its rows first."""
        state = self._source.state(component)
        key = (component, self._bound(recipe), _spelled(factors), state)
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        quantized = self._cached(component, recipe, factors)
        self._recent[key] = quantized
        self._recent_bytes += _size(quantized)
        while self._recent and self._recent_bytes > MEMORY_BUDGET:
            self._recent_bytes -= _size(self._recent.popitem(last=False)[1])
        return quantized

    def values(self, component: str, recipe: Recipe) -> Tensor:
        """The float32 values that a runtime computes with, on the weight's device."""
        return recipe.grid.dequantize(self.quantized(component, recipe))

    def digest(self, component: str, recipe: Recipe) -> str:
        key = (component, self._bound(recipe), self._source.state(component))
        if key not in self._digests:
            self._digests[key] = self.quantized(component, recipe).digest
        return self._digests[key]

    def digests(self, recipes: Mapping[str, Recipe]) -> dict[str, str]:
        """Component → digest of its stored form, for a whole plan."""
        return {name: self.digest(name, recipe) for name, recipe in recipes.items()}

    def _cached(self, component: str, recipe: Recipe, factors: Factors) -> Quantized:
        if self._disk is None or not recipe.quantizer.is_expensive(recipe.grid):
            return self._computed(component, recipe, factors)
        method = f"{self._bound(recipe)} {recipe.quantizer.version}"
        name = f"{self._original(component)} {method} {_spelled(factors)} {component}"
        quantized = self._disk.take(name)
        if quantized is None:
            quantized = self._computed(component, recipe, factors)
            self._disk.put(name, quantized)
        return moved(quantized, self._source.device)

    def keep_tuned(self, component: str, recipe: Recipe, quantized: Quantized) -> None:
        """Stores what a tuned recipe stands for, beside the folder of the cache."""
        if self._tuned is None:
            raise FormatError(
                f"{component}: tuned weights are kept in a run folder, and this store has none"
            )
        self._tuned.put(f"{recipe} {component}", quantized)

    def has_tuned(self, component: str, recipe: Recipe) -> bool:
        return self._tuned_weight(component, recipe) is not None

    def _tuned_weight(self, component: str, recipe: Recipe) -> Quantized | None:
        name = f"{recipe} {component}"
        return None if self._tuned is None else self._tuned.take(name)

    def _computed(self, component: str, recipe: Recipe, factors: Factors) -> Quantized:
        device = self._source.device
        is_scaled = not isinstance(factors, float) or factors != 1.0
        if isinstance(factors, Tensor):
            factors = factors.to(device)
        if not recipe.is_tuned:
            weight = self._source.weight(component).detach()
            weight = weight.float() * factors if is_scaled else weight
            return self._rounded(weight, component, recipe)
        quantized = self._tuned_weight(component, recipe)
        if quantized is None:
            raise FormatError(
                f"{component}: {recipe} is not in this run; tune the plan: kl-lens plan --tune"
            )
        quantized = moved(quantized, device)
        if not is_scaled:
            return quantized
        # The scales take the factors, so codes are the same with and without them.
        scales = [scale.float() * factors for scale in scales_of(recipe.grid, quantized)]
        return with_scales(recipe.grid, quantized, scales)

    def _rounded(
        self,
        weight: Tensor,
        component: str,
        recipe: Recipe,
        experts: Tensor | None = None,
    ) -> Quantized:
        """The component's weight, or some rows of it, on the recipe's grid; `experts`: only of these."""
        quantize = recipe.quantizer.quantize
        if recipe.quantizer.learns:
            inputs = self._inputs(recipe, component, experts)
            return quantize(weight, recipe.grid, component, inputs)
        step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
        if weight.dim() != 2 or len(weight) <= step:
            return quantize(weight, recipe.grid, component, None)
        # In parts, so that a large matrix is never whole in float32. Rows are independent.
        parts = [
            quantize(rows, recipe.grid, component, None) for rows in weight.split(step)
        ]
        return Quantized.stacked(parts, tuple(weight.shape))

    def _original(self, component: str) -> str:
        """A digest of the weight, so that the same matrix in another checkpoint is found again."""
        key = (component, None, self._source.state(component))
        if key not in self._digests:
            weight = self._source.weight(component).detach()
            digest = str(tuple(weight.shape))
            step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
            for rows in weight.reshape(-1, weight.shape[-1]).split(step):
                # As float32: quantizers see nothing else.
                digest = tensor_digest(rows.float(), about=digest)
            self._digests[key] = digest
        return self._digests[key]


def _spread(count: int, weight: Tensor, dim: int) -> Tensor:
    """So many indices of a dimension, evenly spread."""
    count = min(count, weight.shape[dim])
    return torch.arange(count, device=weight.device) * weight.shape[dim] // count


def state_of(weight: Tensor) -> Hashable:
    """Address and write count of a tensor in memory."""
    return weight.data_ptr(), weight._version


def _spelled(factors: Factors) -> str:
    if isinstance(factors, float):
        return repr(factors)
    return bytes_digest(factors.cpu().numpy())


def _size(quantized: Quantized) -> int:
    return sum(part.nbytes for part in quantized.tensors.values())


def moved(quantized: Quantized, device: torch.device) -> Quantized:
    """The same weight on this device."""
    if quantized.data.device == device:
        return quantized
    tensors = {name: part.to(device) for name, part in quantized.tensors.items()}
    copy = Quantized(quantized.format, quantized.shape, **tensors)
    return copy.known_as(quantized.digest) if "digest" in vars(quantized) else copy


class DiskCache:
    """Weights by the name of what made them: atomic, safe to delete. What another process wrote is checked.

    Over the budget, the least recently used go first.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self._budget = budget
        # The time of a file that was written here, or checked.
        self._sound: dict[Path, int] = {}

    def take(self, name: str) -> Quantized | None:
        """The weight stored under this name, if it exists and is undamaged."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                parts = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
            shape = tuple(int(size) for size in about["shape"].split(","))
            digest = about["digest"]
            quantized = Quantized(about["format"], shape, **parts)
            if self._sound.get(path) == path.stat().st_mtime_ns:
                quantized = quantized.known_as(digest)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None
        if quantized.digest != digest:  # damaged
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # another store of this folder needed the room
            os.utime(path)
            self._sound[path] = path.stat().st_mtime_ns
        return quantized

    def put(self, name: str, quantized: Quantized) -> None:
        path = self._path(name)
        tensors = {
            part: on_host(tensor).contiguous()
            for part, tensor in quantized.tensors.items()
        }
        if sum(tensor.nbytes for tensor in tensors.values()) > self._budget:
            return
        about = {
            "format": quantized.format,
            "digest": quantized.digest,
            "shape": ",".join(map(str, quantized.shape)),
        }
        with whole(path) as temporary:
            save_file(tensors, temporary, about)
        with suppress(FileNotFoundError):  # as above
            self._sound[path] = path.stat().st_mtime_ns
        self._trim(path)

    def _trim(self, newest: Path) -> None:
        files = []
        for path in newest.parent.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another store of this folder was faster
                files.append((path.stat(), path))
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda item: item[0].st_mtime_ns):
            if total <= self._budget or path == newest:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _path(self, name: str) -> Path:
        return self.folder / f"{bytes_digest(about=name)}.safetensors"
