"""The numbers that each weight may become once its group's scale is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Levels:
    """Value = scale · code + offset, with whole codes from `lowest` to `highest`; or scale · table[code] + offset.

    Groups are runs of `group` columns. Rows do not depend on each other.
    """

    group: int
    scales: torch.Tensor  # (rows, groups), float32, as a runtime computes with them
    lowest: int
    highest: int
    offsets: torch.Tensor | None = None  # (rows, groups), float32
    table: tuple[float, ...] | None = None  # ascending; codes are then places in it
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def inverses(self) -> torch.Tensor:
        return torch.where(self.scales == 0, 0, 1 / torch.where(self.scales == 0, 1, self.scales))

    @cached_property
    def _offsets(self) -> torch.Tensor:
        return torch.zeros_like(self.scales) if self.offsets is None else self.offsets

    @cached_property
    def _table(self) -> torch.Tensor:
        return torch.tensor(self.table or (0.0,), dtype=torch.float32, device=self.scales.device)

    def rows(self, chosen: slice) -> Levels:
        offsets = None if self.offsets is None else self.offsets[chosen].contiguous()
        scales = self.scales[chosen].contiguous()
        return Levels(self.group, scales, self.lowest, self.highest, offsets, self.table)

    def arrays(self, columns: torch.Tensor) -> tuple[Any, ...]:
        """What the kernels take: the columns' groups, and all scales."""
        return (
            (columns // self.group).to(torch.int32).numpy(),
            self.scales.numpy(),
            self.inverses.numpy(),
            self._offsets.numpy(),
            np.float32(self.lowest),
            np.float32(self.highest),
            self._table.numpy(),
        )

    def nearest(self, values: torch.Tensor, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (float32) of the levels next to these values, (rows,), in one column, and the levels' values."""
        g = column // self.group
        scaled = (values - self._offsets[:, g]) * self.inverses[:, g]
        if self.table is None:
            codes = scaled.round_().clamp_(self.lowest, self.highest)
        else:
            middles = (self._table[1:] + self._table[:-1]) / 2
            codes = torch.searchsorted(middles, scaled).float()
        return codes, self.value(codes, column)

    def value(self, codes: torch.Tensor, column: int) -> torch.Tensor:
        g = column // self.group
        places = codes if self.table is None else self._table[codes.long()]
        return places * self.scales[:, g] + self._offsets[:, g]

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of all codes, (rows, columns)."""
        places = codes if self.table is None else self._table[codes.long()]
        grouped = places.unflatten(-1, (-1, self.group))
        return (grouped * self.scales.unsqueeze(-1) + self._offsets.unsqueeze(-1)).flatten(-2)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Codes of the nearest levels, (rows, columns)."""
        grouped = weight.unflatten(-1, (-1, self.group))
        scaled = (grouped - self._offsets.unsqueeze(-1)) * self.inverses.unsqueeze(-1)
        if self.table is None:
            return scaled.round_().clamp_(self.lowest, self.highest).flatten(-2)
        middles = (self._table[1:] + self._table[:-1]) / 2
        return torch.searchsorted(middles, scaled.contiguous()).float().flatten(-2)
