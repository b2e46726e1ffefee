"""The values that a weight can take once its group's scale is fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kl_lens.base.accelerators import constant
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.blocks import IQ4_LEVELS, LAYOUTS, dequantized, with_codes


@dataclass(frozen=True, eq=False)
class Levels:
    """Value = scale · place + offset. Places are the whole codes from `lowest` to `highest`, less the zero point;
    or the entries of a table, with codes as indices.

    Groups are runs of `group` columns. Rows do not depend on each other. Codes are float32 tensors here.
    """

    group: int
    scales: Tensor  # (rows, groups), float32, as a runtime computes with them
    lowest: int
    highest: int
    zero_points: Tensor | None = None  # (rows, groups), float32
    table: tuple[float, ...] | None = None  # ascending
    # (rows, groups), float32: the minima stored beside a block's scales.
    offsets: Tensor | None = None
    # Scales are not fitted to codes: too coarse (powers of two), or found by ggml's search.
    fixed: bool = False

    def with_scales(self, scales: Tensor, zero_points: Tensor | None = None) -> Levels:
        return replace(self, scales=scales, zero_points=zero_points)

    @cached_property
    def inverses(self) -> Tensor:
        return torch.where(self.scales == 0, 0, 1 / self.scales)

    @cached_property
    def shifts(self) -> Tensor:
        """The value of code 0: the offset less zero point × scale."""
        offsets = torch.zeros_like(self.scales) if self.offsets is None else self.offsets
        if self.zero_points is None:
            return offsets
        return offsets - self.zero_points * self.scales

    @cached_property
    def entries(self) -> Tensor:
        """The table, or a single zero."""
        table = torch.tensor(self.table or (0.0,), dtype=torch.float32)
        return constant(table, self.scales.device)

    def rounded(self, weight: Tensor) -> Tensor:
        """Codes of the nearest levels, (rows, columns)."""
        grouped = weight.unflatten(-1, (-1, self.group)) - self.shifts.unsqueeze(-1)
        scaled = (grouped * self.inverses.unsqueeze(-1)).flatten(-2)
        if self.table is None:
            return scaled.round_().clamp_(self.lowest, self.highest)
        borders = (self.entries[1:] + self.entries[:-1]) / 2
        return torch.bucketize(scaled, borders).float()

    def values(self, codes: Tensor) -> Tensor:
        """The values of all codes, (rows, columns)."""
        grouped = self._looked_up(codes).unflatten(-1, (-1, self.group))
        shifts = self.shifts.unsqueeze(-1)
        return torch.addcmul(shifts, grouped, self.scales.unsqueeze(-1)).flatten(-2)

    def places(self, codes: Tensor) -> Tensor:
        """The factors of the scales, (rows, columns)."""
        looked_up = self._looked_up(codes)
        if self.zero_points is None:
            return looked_up
        grouped = looked_up.unflatten(-1, (-1, self.group))
        return (grouped - self.zero_points.unsqueeze(-1)).flatten(-2)

    def arrays(self, columns: Tensor) -> tuple[Any, ...]:
        """The kernels' arguments: the columns' groups, and all scales."""
        return (
            (columns // self.group).to(torch.int32).cpu().numpy(),
            *(part.cpu().numpy() for part in (self.scales, self.inverses, self.shifts)),
            np.float32(self.lowest),
            np.float32(self.highest),
            self.entries.cpu().numpy(),
        )

    def _looked_up(self, codes: Tensor) -> Tensor:
        return codes if self.table is None else self.entries[codes.long()]


def block_levels(quantized: Quantized) -> Levels:
    """The values that each code stands for, given the scales of a matrix in ggml's blocks."""
    layout = LAYOUTS[quantized.format]

    def all_at(code: int) -> Tensor:
        codes = torch.full(quantized.shape, float(code), device=quantized.data.device)
        values = dequantized(layout, with_codes(quantized, codes).data)
        return values[:, :: layout.group].contiguous()

    if layout.table:
        # Code 8 is level 1, so its value is the scale.
        table = tuple(float(level) for level in IQ4_LEVELS)
        return Levels(layout.group, all_at(8), 0, layout.highest, table=table, fixed=True)
    lowest = all_at(0)
    scales = (all_at(layout.highest) - lowest) / layout.highest
    return Levels(layout.group, scales, 0, layout.highest, offsets=lowest, fixed=True)
