"""The weight store: the only caller of quantizers.

Measuring, exporting, evaluating and timing all take their weights from here, so they cannot differ. Results of
expensive methods are cached on disk if the store has a folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

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


Factors = float | torch.Tensor  # one factor, or (rows, 1)


class WeightSource(Protocol):
    """A model's weights by component: in memory, or read from disk one by one."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def weight(self, component: str) -> torch.Tensor:
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
        self._source = source
        self._statistics = statistics
        self._disk: DiskCache | None = None
        self._tuned: DiskCache | None = None
        if folder is not None:
            self.keep_in(folder, disk_budget)
        self._recent: OrderedDict[tuple[Hashable, ...], Quantized] = OrderedDict()
        self._recent_bytes = 0
        self._originals: dict[tuple[str, Hashable], str] = {}
        self._digests: dict[tuple[Hashable, ...], str] = {}
        self._last: tuple[tuple[str, Statistics], InputStatistics] | None = None

    def keep_in(self, folder: Path, budget: int = DISK_BUDGET) -> None:
        """Caches expensive results in this folder."""
        self._disk = DiskCache(folder, budget)
        self._tuned = DiskCache(folder.parent / TUNED, sys.maxsize)

    def learn_from(self, statistics: Statistics) -> None:
        """Sets the statistics for methods that learn."""
        self._statistics = statistics

    def learnt_by(
        self, recipes: Iterable[Recipe], expected: str | None = None
    ) -> str | None:
        """The digest of the statistics these recipes use; None if no recipe learns.

        Raises if there are none, or others than expected.
        """
        for recipe in recipes:
            if recipe.quantizer.learns:
                known = self._learnt_from(recipe).digest
                if expected not in (None, known):
                    raise FormatError(
                        f"{recipe}: the plan was made with statistics {expected}, but the run has {known}; make the "
                        "plan again, or restore the old statistics"
                    )
                return known
        return None

    def output_error(
        self, component: str, recipe: Recipe, rows: int | None = None
    ) -> float:
        """E‖(W − Q) x‖² over the calibration inputs x: the error of the component's outputs.

        `rows`: estimated from so many rows, evenly spread, of a few experts. All quantizers treat rows independently.
        """
        weight = self._source.weight(component).detach()
        every = weight.numel()
        experts = None
        if rows is not None and rows < weight.shape[-2]:
            if weight.dim() == 3:
                experts = _spread(_EXPERTS, weight, 0)
                weight = weight[experts]
            weight = weight[..., _spread(rows, weight, -2), :].float()
            values = recipe.grid.dequantize(
                self._rounded(weight, component, recipe, experts)
            )
        else:
            values = self.values(component, recipe)
        share = weight.numel() / every
        moments = _some(
            self._of(self._learnt_from(recipe), component), experts
        ).second_moments
        step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
        total = 0.0
        for index, (before, after) in enumerate(
            zip(_matrices(weight), _matrices(values), strict=True)
        ):
            own = moments if moments.dim() == 2 else moments[index]
            for first in range(0, len(before), step):
                errors = (
                    before[first : first + step].float() - after[first : first + step]
                )
                total += float(((errors @ own) * errors).sum(dtype=torch.float64))
        return total / share

    def _bound(self, recipe: Recipe) -> str:
        """The recipe with the digest of its statistics; raises if there are none."""
        return (
            f"{recipe}@{self._learnt_from(recipe).digest}"
            if recipe.quantizer.learns
            else recipe
        )

    def _learnt_from(self, recipe: Recipe) -> Statistics:
        if self._statistics is None:
            raise UnlearntError(
                f"{recipe}: {recipe.method} needs statistics and this model has none; gather them with: "
                "kl-lens calibrate MODEL --run DIR (in Python: Study.calibrate)"
            )
        if callable(self._statistics):  # opened on first use
            self._statistics = self._statistics()
        return self._statistics

    def _of(self, statistics: Statistics, component: str) -> InputStatistics:
        """On the weights' device, kept until another component's are wanted: its recipes come one after another."""
        if self._last is None or self._last[0] != (component, statistics):
            self._last = None  # two would not fit
            self._last = (
                (component, statistics),
                statistics.of(component, self._source.device),
            )
        return self._last[1]

    def quantized(
        self, component: str, recipe: Recipe, factors: Factors = 1.0
    ) -> Quantized:
        """The quantized component; `factors` are multiplied with its rows first."""
        key = (
            component,
            self._bound(recipe),
            _spelled(factors),
            self._source.state(component),
        )
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        made = self._kept(component, recipe, factors)
        self._recent[key] = made
        self._recent_bytes += _size(made)
        while self._recent and self._recent_bytes > MEMORY_BUDGET:
            self._recent_bytes -= _size(self._recent.popitem(last=False)[1])
        return made

    def values(self, component: str, recipe: Recipe) -> torch.Tensor:
        """The float32 values that a runtime computes with, on the weight's device."""
        return recipe.grid.dequantize(self.quantized(component, recipe))

    def digest(self, component: str, recipe: Recipe) -> str:
        key = (component, self._bound(recipe), self._source.state(component))
        if key not in self._digests:
            self._digests[key] = self.quantized(component, recipe).digest
        return self._digests[key]

    def digests(self, recipes: Mapping[str, Recipe]) -> dict[str, str]:
        """Component → digest of its stored form, for a whole plan."""
        return {
            component: self.digest(component, recipe)
            for component, recipe in recipes.items()
        }

    def _kept(self, component: str, recipe: Recipe, factors: Factors) -> Quantized:
        if self._disk is None or not recipe.quantizer.is_expensive(recipe.grid):
            return self._computed(component, recipe, factors)
        known = f"{self._original(component)} {self._bound(recipe)} {recipe.quantizer.version}"
        name = f"{known} {_spelled(factors)} {component}"
        kept = self._disk.take(name)
        if kept is None:
            kept = self._computed(component, recipe, factors)
            self._disk.put(name, kept)
        device = self._source.device
        return kept if kept.data.device == device else moved(kept, device)

    def keep_tuned(self, component: str, recipe: Recipe, quantized: Quantized) -> None:
        """Stores what a tuned recipe stands for, beside the folder of the cache."""
        if self._tuned is None:
            raise FormatError(
                f"{component}: tuned weights are kept in a run folder, and this store has none"
            )
        self._tuned.put(f"{recipe} {component}", quantized)

    def has_tuned(self, component: str, recipe: Recipe) -> bool:
        return (
            self._tuned is not None
            and self._tuned.take(f"{recipe} {component}") is not None
        )

    def _taken(self, component: str, recipe: Recipe, factors: Factors) -> Quantized:
        """A tuned weight. Its scales take the factors, so its codes are the same with and without them."""
        kept = None if self._tuned is None else self._tuned.take(f"{recipe} {component}")
        if kept is None:
            raise FormatError(
                f"{component}: {recipe} is not in this run; tune the plan: kl-lens plan --tune"
            )
        kept = moved(kept, self._source.device)
        if isinstance(factors, float) and factors == 1.0:
            return kept
        spread = factors if isinstance(factors, float) else factors.to(kept.data.device)
        scales = [scale.float() * spread for scale in scales_of(recipe.grid, kept)]
        return with_scales(recipe.grid, kept, scales)

    def _computed(self, component: str, recipe: Recipe, factors: Factors) -> Quantized:
        if recipe.is_tuned:
            return self._taken(component, recipe, factors)
        weight = self._source.weight(component).detach()
        if not isinstance(factors, float) or factors != 1.0:
            weight = weight.float() * (
                factors if isinstance(factors, float) else factors.to(weight.device)
            )
        return self._rounded(weight, component, recipe)

    def _rounded(
        self,
        weight: torch.Tensor,
        component: str,
        recipe: Recipe,
        experts: torch.Tensor | None = None,
    ) -> Quantized:
        """The component's weight, or some rows of it, on the recipe's grid; `experts`: only of these."""
        if recipe.quantizer.learns:
            statistics = _some(self._of(self._learnt_from(recipe), component), experts)
            return recipe.quantizer.quantize(weight, recipe.grid, component, statistics)
        rows = weight.shape[-2] if weight.dim() == 2 else 0
        step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
        if rows <= step:
            return recipe.quantizer.quantize(weight, recipe.grid, component, None)
        # In parts, so that a large matrix is never whole in float32. Rows are independent.
        parts = [
            recipe.quantizer.quantize(
                weight[first : first + step], recipe.grid, component, None
            )
            for first in range(0, rows, step)
        ]
        return Quantized.stacked(parts, tuple(weight.shape))

    def _original(self, component: str) -> str:
        """A digest of the weight, so that the same matrix in another checkpoint is found again."""
        key = (component, self._source.state(component))
        if key not in self._originals:
            self._originals[key] = _digest_of(self._source.weight(component).detach())
        return self._originals[key]


def _digest_of(weight: torch.Tensor) -> str:
    total = str(tuple(weight.shape))
    step = max(1, _ROWS_AT_ONCE // weight.shape[-1])
    for rows in weight.reshape(-1, weight.shape[-1]).split(step):
        total = tensor_digest(
            rows.float(), about=total
        )  # as float32: quantizers see nothing else
    return total


def _spread(count: int, weight: torch.Tensor, dim: int) -> torch.Tensor:
    """So many indices of a dimension, evenly spread."""
    count = min(count, weight.shape[dim])
    return torch.arange(count, device=weight.device) * weight.shape[dim] // count


def _some(statistics: InputStatistics, experts: torch.Tensor | None) -> InputStatistics:
    """The statistics of some experts; all may share one."""
    if experts is None or statistics.second_moments.dim() == 2:
        return statistics
    tokens = tuple(statistics.tokens[expert] for expert in experts.tolist())
    return replace(
        statistics, second_moments=statistics.second_moments[experts], tokens=tokens
    )


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.dim() == 3 else weight[None]


def state_of(weight: torch.Tensor) -> Hashable:
    """Address and write count of a tensor in memory."""
    return weight.data_ptr(), weight._version


def _spelled(factors: Factors) -> str:
    return (
        repr(factors)
        if isinstance(factors, float)
        else bytes_digest(factors.cpu().numpy())
    )


def _size(quantized: Quantized) -> int:
    return sum(part.nbytes for part in quantized.tensors.values())


def moved(quantized: Quantized, device: torch.device) -> Quantized:
    """The same weight on another device."""
    there = {name: part.to(device) for name, part in quantized.tensors.items()}
    made = Quantized(quantized.format, quantized.shape, **there)
    return made.known_as(quantized.digest) if "digest" in vars(quantized) else made


class DiskCache:
    """Weights by the name of what made them: atomic, safe to delete. What another process wrote is checked.

    Over the budget, the least recently used go first.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self._budget = budget
        self._sound: dict[
            Path, int
        ] = {}  # the time of a file that was written here, or checked

    def take(self, name: str) -> Quantized | None:
        """The weight stored under this name, if it exists and is undamaged."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                known = file.metadata() or {}
                parts = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
            shape = tuple(int(size) for size in known["shape"].split(","))
            digest = known["digest"]
            quantized = Quantized(known["format"], shape, **parts)
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
        about = {"format": quantized.format, "digest": quantized.digest}
        with whole(path) as temporary:
            save_file(
                tensors, temporary, about | {"shape": ",".join(map(str, quantized.shape))}
            )
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
        return (
            self.folder
            / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"
        )
