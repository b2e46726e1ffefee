"""What every quantizer can do, and what it may know of a component's inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kl_lens.formats import Format, Quantized

if TYPE_CHECKING:  # recipes are read and spelled without torch
    import torch


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """What calibration text showed of the inputs of one component's products."""

    second_moments: torch.Tensor  # E[x xᵀ], float32: (columns, columns), or (experts, columns, columns)
    tokens: tuple[int, ...]  # how many inputs that rests on; one number, or one for each expert
    correction: torch.Tensor | None = None  # in order: what is added to the weight before it is rounded

    @property
    def importance(self) -> torch.Tensor:
        """E[x²] of every column."""
        return self.second_moments.diagonal(dim1=-2, dim2=-1)


class Quantizer(ABC):
    """One method. Without state: the same weight, format and statistics give the same bits."""

    name: ClassVar[str]  # as recipes spell it
    version: ClassVar[int] = 1  # raise it whenever the method gives other numbers for the same inputs
    learns: ClassVar[bool] = False  # needs statistics of the component's inputs
    of_a_plan: ClassVar[bool] = False  # … as they are behind a plan's earlier components

    def suits(self, fmt: Format) -> str | None:
        """None, or why this method has no meaning for a format."""
        return None

    def is_expensive(self, fmt: Format) -> bool:
        """Whether a result is worth keeping on disk."""
        return self.learns

    @abstractmethod
    def quantize(
        self, weight: torch.Tensor, fmt: Format, name: str, statistics: InputStatistics | None
    ) -> Quantized:
        """The weight on the format's grid; `name` is what an error message calls it."""
