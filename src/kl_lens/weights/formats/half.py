"""FP16: the baseline that everything else is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_lens.weights.formats.format import FP16, Format, Quantized, register

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HalfFormat(Format):
    """IEEE half precision: nearest, ties to even, gradual underflow.

    An exporter should store these values as FP16 itself. OpenVINO 2026.4's `save_model` doubles those that
    round up to a power of two below 6e-5, and keeps float32 for a tensor with many very small values.
    """

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)

    def _quantize(self, weight: torch.Tensor) -> Quantized:
        return Quantized(self.name, tuple(weight.shape), weight.half())

    def _dequantize(self, quantized: Quantized) -> torch.Tensor:
        return quantized.data.float()


register(HalfFormat(FP16, bits=16, group_size=None, symmetric=True))
