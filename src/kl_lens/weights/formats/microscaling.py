"""MXFP4: four-bit floats (E2M1) with a power of two (E8M0) for every 32 columns. NNCF's mode, in float32:

    s = the smallest power of two with max|w| ≤ 6 s, from 2^−23 to 2^13
    q = the level nearest to w / s; a tie goes to the level with an even code
    w′ = level[q] · s                               (exact in FP16 too)

NNCF takes a rounded logarithm, so it may take half our scale where max|w| is just above 6 times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.format import Quantized, register
from kl_lens.weights.formats.integer import NNCF_SMALLEST_SCALE, TableFormat, pack_codes

if TYPE_CHECKING:
    import torch

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # in the order of E2M1's codes
ZERO = len(MAGNITUDES) - 1  # index of the level 0
LEVELS = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2
# A value on a border goes down. Above a level with an odd code it has to go up, so that border lies a bit lower.
BORDERS = np.where(np.arange(len(_MIDDLES)) % 2 == 0, np.nextafter(_MIDDLES, np.float32(-7)), _MIDDLES)
LARGEST_SCALE = 2.0**13  # 6 s still fits FP16


@dataclass(frozen=True)
class MicroscalingFormat(TableFormat):
    """`Quantized.scales` holds exponents + 127 (uint8)."""

    levels, borders = LEVELS, BORDERS

    @property
    def scale_dtype(self) -> torch.dtype:
        import torch

        return torch.uint8

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        import torch

        # The exponent of a float32 is E8M0's code. Adding all ones below it rounds up to a power of two.
        return ((scales.contiguous().view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)

    def scale_values(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        return (stored.int() << 23).view(torch.float32)

    def covering_scales(self, groups: torch.Tensor) -> torch.Tensor:
        import torch

        largest = groups.abs().amax(-1, keepdim=True)
        wanted = (largest / torch.full_like(largest, float(LEVELS[-1]))).clamp(
            NNCF_SMALLEST_SCALE, LARGEST_SCALE
        )
        return self.scale_values(self.stored_scales(wanted))

    def _pack(self, quantized: Quantized) -> npt.NDArray[np.uint8]:
        """E2M1's codes: the magnitude's index, and 8 for a negative sign."""
        places = quantized.data.int() - ZERO
        return pack_codes(places.abs() + 8 * (places < 0), self.bits)


register(MicroscalingFormat("mxfp4", bits=4, group_size=32, symmetric=True, fallback=("int8",)))
