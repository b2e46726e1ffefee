"""What a quantizer is, the input statistics that it may use, and the quantizers by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import Format, Quantized

if TYPE_CHECKING:  # recipes are read and spelled without torch
    import torch


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of one component's inputs on the calibration text."""

    second_moments: torch.Tensor  # E[x xᵀ], float32: (columns, columns), or (experts, columns, columns)
    tokens: tuple[int, ...]  # inputs they were taken over: one number, or one per expert

    @property
    def importance(self) -> torch.Tensor:
        """E[x²] of every column."""
        return self.second_moments.diagonal(dim1=-2, dim2=-1)


class Quantizer(ABC):
    """A method. It has no state: the same weight, format and statistics give the same bits."""

    name: ClassVar[str]  # as recipes spell it
    version: ClassVar[int] = 1  # raise it when the same inputs give other numbers
    learns: ClassVar[bool] = False  # needs statistics of the component's inputs

    def suits(self, fmt: Format) -> str | None:
        """Why this method does not apply to a format, or None if it does."""
        return None

    def is_expensive(self, fmt: Format) -> bool:
        """Whether a result is worth keeping on disk."""
        return self.learns

    @abstractmethod
    def quantize(
        self, weight: torch.Tensor, fmt: Format, name: str, statistics: InputStatistics | None
    ) -> Quantized:
        """The weight on the format's grid. Error messages use `name`."""


TUNED = "tuned"  # recipes spell it with the digest of a tuning: `q4_k+tuned-1f2e3d4c`
QUANTIZERS: dict[str, Quantizer] = {}


def register(quantizer: Quantizer) -> Quantizer:
    if quantizer.name in QUANTIZERS:
        raise FormatError(f"quantizer {quantizer.name!r} is registered twice")
    QUANTIZERS[quantizer.name] = quantizer
    return quantizer


def known_quantizers() -> tuple[str, ...]:
    """The names of all quantizers, in order of registration."""
    return tuple(QUANTIZERS)


def get_quantizer(name: str) -> Quantizer:
    try:
        return QUANTIZERS[TUNED if name.lower().startswith(f"{TUNED}-") else name.lower()]
    except KeyError:
        raise FormatError(f"unknown method {name!r}; known: {', '.join(QUANTIZERS)}") from None
