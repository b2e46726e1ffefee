"""Unsigned integers with a scale and a zero point per row or group: NNCF's INT4_ASYM, bit for bit, in float32,
and the same rule with 2 bits (3 for 15), which NNCF lacks:

    low, high = min(w, 0), max(w, 0)                (zero is always a level)
    s = (high − low)/15, 2^−23 where it is smaller
    z = clip(−round half to even(low / s), 0, 15)
    q = clip(round half to even(w / s + z), 0, 15)  (with the float32 scale)
    w′ = (q − z) · fp16(s)                          (only the stored scale is rounded)

The error is at most half a step for any signs; a row on one side of zero uses all its levels there. The zero
point costs four bits per group: 0.125 bits a weight in groups of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.format import Quantized, register
from kl_lens.weights.formats.integer import NNCF_SMALLEST_SCALE, GroupedFormat, pack_codes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ZeroPointFormat(GroupedFormat):
    """`Quantized.data` and `.zero_points` are uint8, 0 to 15 or 3; zero points have the shape of the scales."""

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return super()._bytes(shape) + (self._groups(shape) * self.bits + 7) // 8

    def pack_zero_points(self, quantized: Quantized) -> npt.NDArray[np.uint8]:
        """The zero points as in a file: of the same type as the weights."""
        self._require_own(quantized)
        assert quantized.zero_points is not None
        return pack_codes(quantized.zero_points, self.bits)

    def _quantize(self, weight: torch.Tensor) -> Quantized:
        import torch

        top = 2**self.bits - 1
        groups = self._grouped(weight)
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # A tensor as divisor: GPUs turn division by a number into a product with its rounded inverse.
        scales = (high - low) / torch.full_like(high, top)
        scales = torch.where(scales < NNCF_SMALLEST_SCALE, NNCF_SMALLEST_SCALE, scales)
        zero_points = (-(low / scales).round()).clamp(0, top)
        integers = (groups / scales).add_(zero_points).round_().clamp_(0, top)
        return self._stored(weight, integers.to(torch.uint8), scales, zero_points.to(torch.uint8))


# Replacements as for the symmetric formats.
register(ZeroPointFormat("uint4", bits=4, group_size=None, symmetric=False))
register(ZeroPointFormat("uint4-g128", 4, 128, False, fallback=("uint4-g64", "uint4-g32", "int8")))
register(ZeroPointFormat("uint4-g64", 4, 64, False, fallback=("uint4-g32", "int8")))
register(ZeroPointFormat("uint4-g32", 4, 32, False, fallback=("int8",)))
register(ZeroPointFormat("uint2-g64", 2, 64, False, fallback=("int4-g32", "int8")))
