"""What defines an architecture: its metadata, and where each tensor of the file comes from.

A model is described by listing every tensor of the file, not by patterns. So anything left over on either side is an
error that names it, and nothing is silently dropped or matched twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.model.files import and_more

Transform = Callable[[torch.Tensor], torch.Tensor]
Factors = float | torch.Tensor  # one, or (rows, 1)
Metadata = dict[
    str, Any
]  # key without the architecture's prefix → int, float, bool, str or list of int
Shapes = Mapping[
    str, tuple[int, ...]
]  # parameter name → shape, everything the checkpoint holds

ENDLESS_CONTEXT = (
    2**20
)  # state-space models have no trained limit, but llama.cpp needs a number


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the file: its name in llama.cpp, the parameter it is made from, and how.

    Transforms also run on tensors without data (device `meta`), to get shapes before anything is read, and on quantized
    rows. They may select, reorder and restack rows, but never look into a row, because formats have their blocks along
    it. Only `float32` tensors may be transposed. `factors` change values, and `columns` reorders runs of columns.
    """

    name: str
    parameter: (
        str | None
    )  # None: made from nothing (a bias that the checkpoint leaves out)
    transform: Transform = as_is
    factors: Factors = 1.0  # for all rows or each, applied before rounding: multipliers that llama.cpp lacks
    float32: bool = False  # llama.cpp's kernels read it as F32
    shape: tuple[int, ...] | None = None  # only for tensors made from nothing
    # (a, b): columns are a · b runs, which the file has in the order b, a. No block may be longer than a run.
    columns: tuple[int, int] = (1, 1)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the file has it: values, or the bytes of quantized rows."""
        rows = self.transform(tensor)
        if self.columns == (1, 1):
            return rows
        return rows.unflatten(-1, (*self.columns, -1)).transpose(-3, -2).flatten(-3)

    def stretch(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that formats must fit: with only the columns that stay together."""
        return (*shape[:-1], shape[-1] // math.prod(self.columns)) if shape else shape


@dataclass(frozen=True)
class Architecture:
    """How families of transformers become an architecture of llama.cpp."""

    names: Mapping[
        str, str | Callable[[Any], str]
    ]  # transformers' → llama.cpp's, or how it is found
    metadata: Callable[[Any], Metadata]
    tensors: Callable[[Any, Shapes], list[TensorRule]]
    refusals: Callable[
        [Any], Iterable[str]
    ]  # reasons why this configuration is not supported
    notes: Callable[[Any], Iterable[str]] = lambda _: ()  # known small differences
    # Tensors of heads for further tokens, if llama.cpp has a place.
    further: Callable[[Any], list[TensorRule]] = lambda _: []

    def name(self, config: Any) -> str:
        found = self.names[config.model_type]
        return found if isinstance(found, str) else found(config)

    def require(self, config: Any) -> None:
        for reason in self.refusals(config):
            raise UnsupportedError(
                f"this {config.model_type} model cannot be written as GGUF: {reason}"
            )


def check_complete(rules: Sequence[TensorRule], shapes: Shapes) -> None:
    """Checks the name map: every parameter is used, every tensor has a source, and names are unique."""
    counts = Counter(rule.name for rule in rules)
    used = {rule.parameter for rule in rules if rule.parameter is not None}
    found = {
        "the checkpoint lacks": used - set(shapes),
        "no tensor of the file takes": set(shapes) - used,
        "two tensors are called": {name for name, count in counts.items() if count > 1},
    }
    problems = [
        f"{label}: {min(names)}{and_more([*names])}"
        for label, names in found.items()
        if names
    ]
    if problems:
        raise TargetError(
            f"weights and the GGUF name map do not fit: {'; '.join(problems)}"
        )
