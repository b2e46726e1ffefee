"""The interface of weight formats, the checks they share, and the formats by name.

A weight is a tensor of shape (rows, columns) or (experts, rows, columns). A row is one output channel; groups and
blocks run along the columns, as in the runtimes' matrix products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kl_lens.base.accelerators import on_host
from kl_lens.base.errors import FormatError
from kl_lens.base.files import tensor_digest
from kl_lens.base.lazy import Tensor, torch

# FP16 cannot hold more. For larger weights NNCF silently writes an infinite scale and llama.cpp an infinite block. No
# trained model comes near, so every format refuses them.
LARGEST_MAGNITUDE = 65504.0


Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight as an artifact stores it."""

    format: str
    shape: Shape
    # int8 (uint8 where unsigned), one per weight; uint8 GGUF blocks (…, rows, bytes per row); float16 values
    data: Tensor
    # (…, rows, groups); GGUF keeps them inside the blocks.
    scales: Tensor | None = None
    # Shaped as the scales: codes of 0 (uint8), or values of code 0 (float16).
    zero_points: Tensor | None = None

    @classmethod
    def stacked(cls, parts: Sequence[Quantized], shape: Shape) -> Quantized:
        """The rows of all parts, one after another, as a weight of this shape."""
        joined = {
            name: torch.cat([part.tensors[name] for part in parts]).reshape(
                *shape[:-1], -1
            )
            for name in parts[0].tensors
        }
        return cls(parts[0].format, shape, **joined)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of data, scales and zero points that there are."""
        names = ("data", "scales", "zero_points")
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    @cached_property
    def digest(self) -> str:
        """Equal digests mean equal weights, bit for bit."""
        return tensor_digest(*self.tensors.values(), about=f"{self.format} {self.shape}")

    def known_as(self, digest: str) -> Quantized:
        """The same, with a digest that need not be computed again."""
        self.__dict__["digest"] = digest
        return self


@dataclass(frozen=True)
class Format(ABC):
    """One way to store a weight."""

    name: str
    bits: int
    group_size: int | None = None  # weights that share one scale; None: the whole row
    # Formats to try, in order, for shapes this one does not fit.
    fallback: tuple[str, ...] = ()

    symmetric: ClassVar = True  # no zero points and no offsets beside scales

    @property
    def block(self) -> int:
        """The number of columns must be a multiple of this."""
        return self.group_size or 1

    @property
    def searches(self) -> bool:
        """Whether quantizing searches over scales, so that caching pays."""
        return False

    @property
    def needs_importance(self) -> bool:
        """Whether quantizing needs the importance of each column."""
        return False

    def fits(self, shape: Sequence[int]) -> str | None:
        """Why a weight of this shape cannot be stored, or None."""
        if len(shape) not in (2, 3) or min(shape) < 1:
            return f"shape {tuple(shape)} is neither (rows, columns) nor (experts, rows, columns)"
        if shape[-1] % self.block:
            return f"{shape[-1]} columns do not divide into blocks of {self.block}"
        return None

    def bytes(self, shape: Sequence[int]) -> int:
        """Exact size on disk: integers, scales and packing, without alignment in the file."""
        self._require_fit(tuple(shape), "weight")
        return self._bytes(tuple(shape))

    def bits_per_weight(self, shape: Sequence[int]) -> float:
        return 8 * self.bytes(shape) / math.prod(shape)

    def quantize(self, weight: Tensor, name: str = "weight") -> Quantized:
        """The stored form; `name` is for error messages."""
        self._require_fit(tuple(weight.shape), name)
        return self._quantize(checked_float32(weight, name))

    @abstractmethod
    def dequantize(self, quantized: Quantized) -> Tensor:
        """The float32 values that a runtime computes with."""

    def roundtrip(self, weight: Tensor) -> Tensor:
        """The float32 values that a runtime computes with after storing `weight`, on the weight's device."""
        return self.dequantize(self.quantize(weight))

    def pack(self, quantized: Quantized) -> Bytes:
        """The data as in a file, without scales."""
        return on_host(quantized.data).contiguous().numpy().reshape(-1).view(np.uint8)

    @abstractmethod
    def _bytes(self, shape: Shape) -> int: ...

    @abstractmethod
    def _quantize(self, weight: Tensor) -> Quantized: ...

    def _require_fit(self, shape: Shape, name: str) -> None:
        if reason := self.fits(shape):
            raise FormatError(
                f"{name}: {self.name} cannot hold it: {reason}; choose another format"
            )


def checked_float32(weight: Tensor, name: str) -> Tensor:
    """The weight in float32; raises if it is not finite or too large."""
    if not weight.dtype.is_floating_point:
        raise FormatError(
            f"{name}: expected floating-point weights, found {weight.dtype}"
        )
    values = weight.detach().float()
    low, high = (float(v) for v in values.aminmax())  # NaN anywhere makes both NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        raise FormatError(
            f"{name}: has NaN or infinity; repair the checkpoint or download it again"
        )
    if (largest := max(-low, high)) > LARGEST_MAGNITUDE:
        raise FormatError(
            f"{name}: has {largest:g}, above FP16's {LARGEST_MAGNITUDE:g}; rescale the weight"
        )
    return values


FP16 = "fp16"  # the format of weights without another

_formats: dict[str, Format] = {}


def register(fmt: Format) -> None:
    """Registers a format. A new format is one file that ends in this call."""
    _formats[fmt.name] = fmt


def known_formats() -> tuple[str, ...]:
    """All names, in order of registration."""
    return tuple(_formats)


def get_format(name: str) -> Format:
    try:
        return _formats[name.lower()]
    except KeyError:
        raise FormatError(
            f"unknown format {name!r}; known: {', '.join(_formats)}"
        ) from None


def fitting_format(wanted: Format, shape: Sequence[int]) -> tuple[Format, str | None]:
    """The format for a weight of this shape, and why it differs from the wanted one (or None)."""
    reason = wanted.fits(shape)
    if reason is None:
        return wanted, None
    for name in wanted.fallback:
        substitute = get_format(name)
        if substitute.fits(shape) is None:
            return substitute, f"{wanted.name}: {reason}; stored as {name}"
    raise FormatError(f"no format can replace {wanted.name}: {reason}")


@dataclass(frozen=True)
class HalfFormat(Format):
    """IEEE half precision: nearest, ties to even, gradual underflow.

    An exporter should store these values as FP16 itself. OpenVINO 2026.4's `save_model` doubles those that
    round up to a power of two below 6e-5, and keeps float32 for a tensor with many very small values.
    """

    def _bytes(self, shape: Shape) -> int:
        return 2 * math.prod(shape)

    def _quantize(self, weight: Tensor) -> Quantized:
        return Quantized(self.name, tuple(weight.shape), weight.half())

    def dequantize(self, quantized: Quantized) -> Tensor:
        return quantized.data.float()


register(HalfFormat(FP16, 16))
