"""What a quantizer is, the input statistics that it may use, and the quantizers by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kl_lens.base.accelerators import elements_at_once
from kl_lens.base.errors import FormatError
from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.format import checked_float32


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of one component's inputs on the calibration text."""

    # E[x xᵀ], float32: (columns, columns), or (experts, columns, columns).
    second_moments: Tensor
    tokens: tuple[int, ...]  # inputs they were taken over: one number, or one per expert


class Quantizer:
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

    def quantize(
        self,
        weight: Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        """The weight on the format's grid, by its own rule. Error messages use `name`."""
        return fmt.quantize(weight, name)


TUNED = "tuned"  # recipes spell it with the digest of a tuning: `q4_k+tuned-1f2e3d4c`
QUANTIZERS: dict[str, Quantizer] = {}


def register(quantizer: Quantizer) -> None:
    QUANTIZERS[quantizer.name] = quantizer


def known_quantizers() -> tuple[str, ...]:
    """The names of all quantizers, in order of registration."""
    return tuple(QUANTIZERS)


def get_quantizer(name: str) -> Quantizer:
    key = name.lower()
    try:
        return QUANTIZERS[TUNED if key.startswith(f"{TUNED}-") else key]
    except KeyError:
        raise FormatError(
            f"unknown method {name!r}; known: {', '.join(QUANTIZERS)}"
        ) from None


class LearningQuantizer(Quantizer, ABC):
    """A method for one matrix and the second moments of its inputs."""

    learns = True

    def quantize(
        self,
        weight: Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        if statistics is None:
            raise FormatError(
                f"{name}: {self.name} needs calibration statistics, and there are none"
            )
        if reason := self.suits(fmt) or fmt.fits(tuple(weight.shape)):
            raise FormatError(f"{name}: {fmt.name}+{self.name} cannot hold it: {reason}")
        moments = statistics.second_moments.to(weight.device)
        expected = (*weight.shape[:-2], weight.shape[-1], weight.shape[-1])
        if moments.shape not in (expected, expected[-2:]):
            raise FormatError(
                f"{name}: its statistics have shape {tuple(moments.shape)}, expected {expected}: "
                "they belong to another model; gather them again"
            )
        if not bool(torch.isfinite(moments).all()):
            raise FormatError(
                f"{name}: its statistics hold NaN or infinity; gather them again"
            )
        values = checked_float32(weight, name)
        experts = values if values.dim() == 3 else values[None]
        pieces: list[Quantized] = []
        for index, expert in enumerate(experts):
            shared = moments.dim() == 2
            tokens = statistics.tokens[0 if shared else index]
            own = moments if shared else moments[index]
            step = max(1, elements_at_once(expert.device) // expert.shape[1])
            for rows in expert.split(step):
                pieces.append(self._rounded(rows, fmt, own, tokens))
        return Quantized.stacked(pieces, tuple(weight.shape))

    @abstractmethod
    def _rounded(
        self, weight: Tensor, fmt: Format, moments: Tensor, tokens: int
    ) -> Quantized:
        """Rows, (rows, columns) in float32. The moments (columns, columns) of so many tokens are finite, possibly all
        zero."""


def best_rows(
    weight: Tensor, fmt: Format, moments: Tensor, choices: Sequence[Quantized]
) -> Quantized:
    """Each row from the choice with the smallest loss e H eᵀ, e its error; ties go to the first."""
    losses = []
    for choice in choices:
        errors = weight - fmt.dequantize(choice)
        losses.append(((errors @ moments) * errors).sum(-1))
    best = torch.stack(losses).argmin(0)
    rows = torch.arange(len(weight), device=best.device)
    tensors = {
        name: torch.stack([c.tensors[name] for c in choices])[best, rows]
        for name in choices[0].tensors
    }
    return Quantized(fmt.name, tuple(weight.shape), **tensors)
