"""Error feedback: round column after column, and let later columns make up for the errors of earlier ones.

What counts is tr(E H Eᵀ) with E = W − Q and H = E[x xᵀ]. With H = R Rᵀ, R upper triangular, and M = R with its columns
divided by their diagonal, it is Σⱼ Rⱼⱼ² |Eⱼ + Σₖ₍ₖ₎ Eₖ Mₖⱼ|² over k < j: rounding wⱼ + Σ Eₖ Mₖⱼ in order makes each term
as small as it can then be. That is GPTQ's rule (its rows of the Cholesky factor of H⁻¹ are those of R⁻¹) without the
inverse. Important columns come first: the last ones have nothing behind them to make up for what they lose.

Rounds of coordinate descent on the same sum follow; each can only make it smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kl_lens.quantizers.kernels import descend, round_in_order
from kl_lens.quantizers.levels import Levels

BLOCK = 128  # columns whose errors are passed on one by one; beyond them, by one product per block


@dataclass(frozen=True)
class Objective:
    """Second moments made definite, with the order and the factor that error feedback needs."""

    moments: torch.Tensor  # (columns, columns), float32, damped
    order: torch.Tensor  # columns, the most important first
    mixing: torch.Tensor  # (columns, columns), unit upper triangular, in that order

    @classmethod
    def of(cls, moments: torch.Tensor, damping: float) -> Objective:
        """`damping`, as a share of the mean of the diagonal, is added to it: columns never active count a little."""
        exact = moments.double()
        diagonal = exact.diagonal()
        exact = exact + torch.eye(len(exact), dtype=exact.dtype, device=exact.device) * (damping * diagonal.mean())
        order = torch.argsort(exact.diagonal(), descending=True, stable=True)
        ordered = exact[order][:, order]
        # Turned round, Cholesky's lower factor is the upper one.
        factor = torch.linalg.cholesky(ordered.flip(0, 1)).flip(0, 1)
        mixing = factor / factor.diagonal()
        return cls(exact.float(), order, mixing.float().contiguous())


def weighted_error(errors: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """e H eᵀ of every row, (rows,)."""
    return ((errors @ moments) * errors).sum(-1)


def fed_back(weight: torch.Tensor, levels: Levels, objective: Objective) -> torch.Tensor:
    """Codes of a weight (rows, columns), rounded in order of importance with error feedback."""
    order = objective.order
    ordered = weight[:, order]
    codes, errors = torch.empty_like(ordered), torch.empty_like(ordered)
    for first in range(0, weight.shape[1], BLOCK):
        block = slice(first, first + BLOCK)
        wanted = ordered[:, block] + errors[:, :first] @ objective.mixing[:first, block]
        codes[:, block], errors[:, block] = round_in_order(
            wanted, ordered[:, block].contiguous(), objective.mixing[block, block].contiguous(), levels, order[block]
        )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return codes[:, back]


def descended(
    weight: torch.Tensor, levels: Levels, codes: torch.Tensor, objective: Objective, rounds: int
) -> torch.Tensor:
    """Codes after some rounds of coordinate descent from those given."""
    codes = codes.clone()
    errors = weight - levels.values(codes)
    moments = objective.moments
    columns = torch.arange(weight.shape[1], device=weight.device)
    for _ in range(rounds):
        for first in range(0, weight.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            pull = errors @ moments[:, block]
            own, left = codes[:, block].contiguous(), errors[:, block].contiguous()
            descend(pull, moments[block, block].contiguous(), own, left, levels, columns[block])
            codes[:, block], errors[:, block] = own, left
    return codes
