"""A file taken apart: its tensors as numbers, and how each of them follows from a parameter of the original."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_lens.formats import Format, get_format
from kl_lens.targets.session import Session, SessionSettings

if TYPE_CHECKING:
    from kl_lens.checkpoints import LoadedModel

Values = Callable[[torch.Tensor], torch.Tensor]

# (f(0), f(1)) of what a file stores instead of a parameter → its inverse: as it is, 1 + x, exp(x), −exp(x).
_INVERSES: dict[tuple[float, float], Values] = {
    (0.0, 1.0): lambda y: y,
    (1.0, 2.0): lambda y: y - 1,
    (1.0, 2.718): torch.log,
    (-1.0, -2.718): lambda y: torch.log(-y),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    type: str  # as the runtime calls it: Q4_K, i4
    shape: tuple[int, ...]  # rows first
    bytes: int
    read: Callable[[], torch.Tensor]  # its values in float32
    format: str = ""  # our name of that type, if we have it
    rounded: Values | None = None  # any values, rounded to nearest in that type; None: not known


@dataclass(frozen=True)
class Part:
    """What the original wants in the file: one tensor, made from one parameter."""

    name: str
    tensor: StoredTensor | None  # None: the file lacks it
    parameter: str | None  # None: zeros
    arrange: Values = lambda value: value
    factors: float | torch.Tensor = 1.0

    def expected(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter as the file should hold it, before rounding."""
        return self.arrange(parameter.float() * self.factors).contiguous()

    def written(self, values: torch.Tensor, into: torch.Tensor) -> torch.Tensor | None:
        """The parameter with the file's values in place of its own; None if the way back is not known.

        The way back is found by sending zeros, ones and positions through `arrange`.
        """
        shape, count = into.shape, into.numel()
        zero, one = (float(self.arrange(torch.full(shape, end)).flatten()[0]) for end in (0.0, 1.0))
        ends = round(zero, 3), round(one, 3)
        if (inverse := _INVERSES.get(ends)) is None:
            return None
        if ends == (0.0, 1.0):
            places = self.arrange(torch.arange(count).reshape(shape))
        else:  # of a vector or a small matrix; in steps below one, so that exp stays finite
            steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
            places = (inverse(self.arrange(steps.float().reshape(shape)).double()) * count - 0.5).round()
        index = places.flatten().long()
        if values.numel() != index.numel():
            return None
        factors = torch.as_tensor(self.factors, dtype=torch.float32).broadcast_to(shape).flatten()
        whole = into.float().flatten().clone()
        whole[index] = inverse(values.flatten()) / factors[index]
        return whole.reshape(shape)


@dataclass(frozen=True)
class Disagreement:
    """A setting of the file that is not the original's."""

    name: str
    found: Any
    expected: Any
    matters: bool = True  # False: it changes no result

    @property
    def words(self) -> str:
        return f"{self.name} is {_shown(self.found)} in the file, {_shown(self.expected)} in the original"


class Dissection(ABC):
    """One file, ready for an autopsy."""

    place: Path
    files: tuple[Path, ...]  # that the runtime loads
    tensors: tuple[StoredTensor, ...]
    usual_settings: bool = True  # it is run with the settings that `Target.activations` describes

    @abstractmethod
    def parts(self, model: LoadedModel) -> list[Part]:
        """Everything that the original wants in the file. UnsupportedError: the family's names are not known."""

    @abstractmethod
    def disagreements(self, model: LoadedModel) -> list[Disagreement]:
        """Settings that are not those of config.json and the tokenizer."""

    @abstractmethod
    def open(self, settings: SessionSettings) -> Session:
        """Opens it in its runtime, after a try in a separate process."""

    @abstractmethod
    def other_tokens(self, session: Session, tokenizer: Any) -> str | None:
        """A text that the file's tokenizer splits differently; None if there is none. UnsupportedError: it has no
        tokenizer, or none that can be compared."""


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rounding(fmt: Format | str) -> Values | None:
    """Rounds any values to nearest in a format; None for one that needs more than the values."""
    if isinstance(fmt, str) and fmt in DTYPES:
        dtype = DTYPES[fmt]
        return lambda value: value.to(dtype).float()
    if not fmt:
        return None
    grid = get_format(fmt) if isinstance(fmt, str) else fmt
    if grid.needs_importance:
        return None

    def rounded(value: torch.Tensor) -> torch.Tensor:
        # Blocks that are longer than a row belong to what should not have been quantized.
        rows = value if grid.fits(value.shape) is None else value.reshape(1, -1)
        return value if grid.fits(rows.shape) else grid.roundtrip(rows).reshape(value.shape)

    return rounded


def same(found: Any, expected: Any) -> bool:
    """Whether two settings mean the same; a list of one number for all layers is that number."""
    if isinstance(found, list) != isinstance(expected, list):
        one, many = (expected, found) if isinstance(found, list) else (found, expected)
        return set(many) - {0} <= {one}
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=1e-5)
    return bool(found == expected)


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
