"""Picks, row by row, the version of a matrix with the least loss, so a method is never worse than its alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kl_lens.weights.formats import Format, Quantized


def row_losses(
    weight: torch.Tensor, fmt: Format, quantized: Quantized, moments: torch.Tensor
) -> torch.Tensor:
    """e H eᵀ of every row's error e, (rows,)."""
    errors = weight - fmt.dequantize(quantized)
    return ((errors @ moments) * errors).sum(-1)


def best_rows(
    weight: torch.Tensor, fmt: Format, moments: torch.Tensor, choices: Sequence[Quantized]
) -> Quantized:
    """Each row from the choice with the smallest loss; ties go to the first."""
    losses = torch.stack([row_losses(weight, fmt, choice, moments) for choice in choices])
    best = losses.argmin(0)

    def picked(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [part for part in parts if part is not None]
        if not there:
            return None
        rows = torch.arange(len(best), device=best.device)
        return torch.stack(there)[best, rows]

    data = picked([c.data for c in choices])
    assert data is not None
    return Quantized(
        fmt.name, tuple(weight.shape), data, picked([c.scales for c in choices]),
        picked([c.zero_points for c in choices]),
    )  # fmt: skip
