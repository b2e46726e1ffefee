"""Four-bit codes that stand for the levels of a table, as in NNCF.

NF4: sixteen levels, quantiles of a normal distribution, and a scale per row or group. NNCF's mode, bit for bit:

    s = max|w|, 2^−23 where it is smaller
    q = the level nearest to w / s                  (with the float32 scale; a tie goes down)
    w′ = level[q] · fp16(s)                         (levels in float32)

OpenVINO 2026.4's CPU plugins compute with exactly these values from our files, in float32. In NNCF's own files the
levels pass through FP16, and the plugins may round them.

MXFP4: four-bit floats (E2M1) with a power of two (E8M0) for every 32 columns. NNCF's mode, in float32:

    s = the smallest power of two with max|w| ≤ 6 s, from 2^−23 to 2^13
    q = the level nearest to w / s; a tie goes to the level with an even code
    w′ = level[q] · s                               (exact in FP16 too)

NNCF takes a rounded logarithm, so it may take half our scale where max|w| is just above 6 times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from kl_lens.base.accelerators import constant
from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats.format import Bytes, Floats, Quantized, register
from kl_lens.weights.formats.integer import (
    NNCF_SMALLEST_SCALE,
    GroupedFormat,
    pack_codes,
    register_groups,
)

NF_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# Midpoints between levels as in NNCF and OpenVINO: four differ from the exact middle in the last bit.
NF_BORDERS = np.array(
    [
        -0.84809643,
        -0.6106329,
        -0.45999527,
        -0.33967942,
        -0.2346074,
        -0.13791174,
        -0.045525018,
        0.03979015,
        0.120255254,
        0.20352125,
        0.29201376,
        0.38931254,
        0.5016634,
        0.6427869,
        0.8614784,
    ],
    np.float32,
)

# In the order of E2M1's codes.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MX_ZERO = len(MAGNITUDES) - 1  # index of the level 0
MX_LEVELS = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])
_MIDDLES = (MX_LEVELS[1:] + MX_LEVELS[:-1]) / 2
# A value on a border goes down. Above a level with an odd code it has to go up, so that border lies a bit lower.
MX_BORDERS = np.where(
    np.arange(len(_MIDDLES)) % 2 == 0, np.nextafter(_MIDDLES, np.float32(-7)), _MIDDLES
)
MX_LARGEST_SCALE = 2.0**13  # 6 s still fits FP16


@dataclass(frozen=True)
class TableFormat(GroupedFormat):
    """`Quantized.data` holds the index of each weight's level (uint8)."""

    levels: ClassVar[Floats]
    # Between levels; a value on a border goes down.
    borders: ClassVar[Floats]

    def _codes(self, scaled: Tensor) -> Tensor:
        borders = self._on(scaled.device)[1]
        return torch.bucketize(scaled.contiguous(), borders).to(torch.uint8)

    def _places(self, codes: Tensor) -> Tensor:
        return self._on(codes.device)[0][codes.long()]

    @classmethod
    @cache
    def _on(cls, device: torch.device) -> tuple[Tensor, Tensor]:
        """Levels and borders on the weight's device."""
        levels = constant(torch.from_numpy(cls.levels), device)
        return levels, constant(torch.from_numpy(cls.borders), device)


@dataclass(frozen=True)
class NormalFloatFormat(TableFormat):
    levels = NF_LEVELS
    borders = NF_BORDERS

    def covering_scales(self, groups: Tensor) -> Tensor:
        return groups.abs().amax(-1, keepdim=True).clamp(min=NNCF_SMALLEST_SCALE)


@dataclass(frozen=True)
class MicroscalingFormat(TableFormat):
    """`Quantized.scales` holds exponents + 127 (uint8)."""

    levels = MX_LEVELS
    borders = MX_BORDERS

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8

    def stored_scales(self, scales: Tensor) -> Tensor:
        # The exponent of a float32 is E8M0's code. Adding all ones below it rounds up to a power of two.
        return ((scales.contiguous().view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)

    def scale_values(self, stored: Tensor) -> Tensor:
        return (stored.int() << 23).view(torch.float32)

    def covering_scales(self, groups: Tensor) -> Tensor:
        largest = groups.abs().amax(-1, keepdim=True)
        scales = largest / torch.full_like(largest, float(MX_LEVELS[-1]))
        scales = scales.clamp(NNCF_SMALLEST_SCALE, MX_LARGEST_SCALE)
        return self.scale_values(self.stored_scales(scales))

    def pack(self, quantized: Quantized) -> Bytes:
        """E2M1's codes: the magnitude's index, and 8 for a negative sign."""
        indices = quantized.data.int() - MX_ZERO
        return pack_codes(indices.abs() + 8 * (indices < 0), self.bits)


register(NormalFloatFormat("nf4", 4))
register_groups(NormalFloatFormat, "nf4", 4)
register(MicroscalingFormat("mxfp4", 4, 32, ("int8",)))
