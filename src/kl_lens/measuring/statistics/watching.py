"""Watches the inputs of every matrix product with given weights.

Hooks on modules miss projections that a model multiplies by their weight (Mamba-1's `dt_proj`) and experts that are
slices of one parameter. So this watches the products themselves: if an operand lies in a weight's memory, the other
operand holds its inputs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")


class Moments:
    """Sums of x xᵀ over the inputs of one weight, per expert.

    Each product is float32; sums are float64, so that many windows cost no precision.
    """

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self.columns = shape[-1]
        self.stacked = len(shape) == 3
        experts = shape[0] if self.stacked else 1
        self.sums = torch.zeros(experts, self.columns, self.columns, dtype=torch.float64, device=device)
        self.tokens = [0] * experts
        self.in_parts = False  # a product used only some of the columns: the moments are incomplete

    def add(self, inputs: torch.Tensor, expert: int = 0) -> None:
        """Adds inputs of shape (…, columns)."""
        rows = inputs.reshape(-1, self.columns).float()
        self.sums[expert] += rows.T @ rows
        self.tokens[expert] += rows.shape[0]

    @property
    def means(self) -> torch.Tensor:
        """E[x xᵀ] in float32; an expert with fewer tokens than columns is filled up with the mean over all experts."""
        tokens = torch.tensor(self.tokens, dtype=torch.float64, device=self.sums.device)[:, None, None]
        overall = self.sums.sum(0) / tokens.sum()
        lacking = (self.columns - tokens).clamp_min(0) if self.stacked else torch.zeros_like(tokens)
        means = ((self.sums + lacking * overall) / (tokens + lacking)).float()
        return means if self.stacked else means[0]


class ProductWatch(TorchFunctionMode):
    """Within the block, every product with a watched weight adds its inputs to that weight's moments."""

    def __init__(self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Moments]) -> None:
        super().__init__()
        self._moments = moments
        ordered = sorted((weights[name].data_ptr(), name, weights[name]) for name in moments)
        self._starts = [start for start, _, _ in ordered]
        self._weights = [(name, weight) for _, name, weight in ordered]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "linear" and len(args) > 1:
            self._see(args[0], args[1], transposed=False)
        elif name in _PRODUCTS and len(args) > 1:
            left, right = args[0], args[1]
            # weight · x: the inputs are the columns of x; x · weightᵀ: its rows.
            if not self._see(right.mT if right.dim() > 1 else right, left, transposed=False):
                self._see(left, right, transposed=True)
        return func(*args, **(kwargs or {}))

    def _see(self, inputs: torch.Tensor, operand: torch.Tensor, *, transposed: bool) -> bool:
        """Adds the inputs if the operand is (part of) a watched weight, (rows, columns) or its transpose."""
        owner = self._owner(operand)
        if owner is None:
            return False
        name, expert = owner
        moments = self._moments[name]
        matrix = operand.mT if transposed else operand
        if matrix.shape[-1] != moments.columns or inputs.shape[-1] != moments.columns or expert is None:
            moments.in_parts = True
        else:
            moments.add(inputs, expert)
        return True

    def _owner(self, operand: torch.Tensor) -> tuple[str, int | None] | None:
        """The weight whose memory holds the operand, and its expert (None: not one whole expert)."""
        at = operand.data_ptr()
        index = bisect.bisect_right(self._starts, at) - 1
        if index < 0:
            return None
        name, weight = self._weights[index]
        offset = (at - self._starts[index]) // weight.element_size()
        if offset >= weight.numel() or operand.dtype != weight.dtype:
            return None
        size = math.prod(weight.shape[-2:])
        expert = offset // size
        return name, expert if offset + operand.numel() <= (expert + 1) * size else None
