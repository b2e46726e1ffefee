"""NF4: sixteen levels, quantiles of a normal distribution, and a scale per row or group. NNCF's mode, bit for bit:

    s = max|w|, 2^−23 where it is smaller
    q = the level nearest to w / s                  (with the float32 scale; a tie goes down)
    w′ = level[q] · fp16(s)                         (levels in float32)

OpenVINO 2026.4's CPU plugins compute with exactly these values from our files, in float32. In NNCF's own files the
levels pass through FP16, and the plugins may round them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kl_lens.weights.formats.format import register
from kl_lens.weights.formats.integer import NNCF_SMALLEST_SCALE, TableFormat

if TYPE_CHECKING:
    import torch

LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
# Midpoints between levels as in NNCF and OpenVINO: four differ from the exact middle in the last bit.
BORDERS = np.array(
    [
        -0.84809643, -0.6106329, -0.45999527, -0.33967942, -0.2346074, -0.13791174, -0.045525018, 0.03979015,
        0.120255254, 0.20352125, 0.29201376, 0.38931254, 0.5016634, 0.6427869, 0.8614784,
    ],
    np.float32,
)  # fmt: skip


@dataclass(frozen=True)
class NormalFloatFormat(TableFormat):
    levels, borders = LEVELS, BORDERS

    def covering_scales(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.abs().amax(-1, keepdim=True).clamp(min=NNCF_SMALLEST_SCALE)


register(NormalFloatFormat("nf4", bits=4, group_size=None, symmetric=True))
register(NormalFloatFormat("nf4-g128", 4, 128, True, fallback=("nf4-g64", "nf4-g32", "int8")))
register(NormalFloatFormat("nf4-g64", 4, 64, True, fallback=("nf4-g32", "int8")))
register(NormalFloatFormat("nf4-g32", 4, 32, True, fallback=("int8",)))
