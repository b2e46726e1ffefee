"""Error feedback: round column after column, and let later columns make up for the errors of earlier ones.

The loss is tr(E H Eᵀ) with E = W − Q and H = E[x xᵀ]. With H = R Rᵀ, R upper triangular, and M = R with its columns
divided by their diagonal, it is Σⱼ Rⱼⱼ² |Eⱼ + Σₖ Eₖ Mₖⱼ|², k < j: rounding wⱼ + Σₖ Eₖ Mₖⱼ column by column
minimises each term in turn. That is GPTQ's rule (the Cholesky factor of H⁻¹ that it uses is R⁻¹), without the inverse.
Important columns come first, because nothing can make up for the errors of the last ones.

Then follow rounds of coordinate descent and scale fitting on the same sum. Each can only make it smaller.

The two inner loops run over the columns of one block: Triton on a GPU, else numba. Rows do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.compiling import njit, prange
from kl_lens.weights.quantizers.group_scales import refitted
from kl_lens.weights.quantizers.levels import Levels

BLOCK = 128  # errors pass column by column within a block, and by one matrix product to later blocks


@dataclass(frozen=True)
class Objective:
    """Damped second moments, with the order and the factor that error feedback needs."""

    moments: Tensor  # (columns, columns), float32, damped
    order: Tensor  # columns, the most important first
    mixing: Tensor  # (columns, columns), unit upper triangular, in that order
    # (columns,), in the original order: Rⱼⱼ², the part of a column's error that later ones cannot absorb.
    remaining: Tensor

    @classmethod
    def of(cls, moments: Tensor, damping: float) -> Objective:
        """Adds `damping` × the diagonal's mean to it, so that columns that were never active count a little too."""
        exact = moments.double()
        mean = exact.diagonal().mean()
        added = damping * torch.where(mean == 0, 1.0, mean)
        exact = exact + torch.eye(len(exact)).to(exact) * added
        order = torch.argsort(exact.diagonal(), descending=True, stable=True)
        # cholesky() gives a lower factor; flipping before and after gives the upper one.
        factor = torch.linalg.cholesky(exact[order][:, order].flip(0, 1)).flip(0, 1)
        diagonal = factor.diagonal()
        remaining = torch.empty_like(diagonal)
        remaining[order] = diagonal.square()
        mixing = (factor / diagonal).float().contiguous()
        return cls(exact.float(), order, mixing, remaining.float())


@lru_cache(maxsize=1)
def last_objective(moments: Tensor, damping: float) -> Objective:
    """`Objective.of`, kept for the next recipe of the same component. (Tensors are compared by identity.)"""
    return Objective.of(moments, damping)


def fed_back(weight: Tensor, levels: Levels, objective: Objective) -> Tensor:
    """Codes of a weight (rows, columns), rounded in order of importance with error feedback."""
    order = objective.order
    mixing = objective.mixing
    ordered = weight[:, order]
    codes = torch.empty_like(ordered)
    errors = torch.empty_like(ordered)
    for first in range(0, weight.shape[1], BLOCK):
        block = slice(first, first + BLOCK)
        part = ordered[:, block].contiguous()
        wanted = part + errors[:, :first] @ mixing[:first, block]
        codes[:, block], errors[:, block] = round_in_order(
            wanted, part, mixing[block, block].contiguous(), levels, order[block]
        )
    return torch.empty_like(codes).index_copy_(1, order, codes)


def descended(
    weight: Tensor, levels: Levels, codes: Tensor, objective: Objective
) -> Tensor:
    """The codes after one round of coordinate descent."""
    codes = codes.clone()
    moments = objective.moments
    errors = weight - levels.values(codes)
    columns = torch.arange(weight.shape[1], device=weight.device)
    for first in range(0, weight.shape[1], BLOCK):
        block = slice(first, first + BLOCK)
        pull = errors @ moments[:, block]
        inner = moments[block, block].contiguous()
        block_codes = codes[:, block].contiguous()
        block_errors = errors[:, block].contiguous()
        descend(pull, inner, block_codes, block_errors, levels, columns[block])
        codes[:, block] = block_codes
        errors[:, block] = block_errors
    return codes


def with_fitted_scales(
    weight: Tensor, levels: Levels, codes: Tensor, objective: Objective
) -> Levels:
    """The levels with each group's scale (and bias) refitted to these codes, rounded to what can be stored."""
    if levels.fixed:
        return levels
    if levels.offsets is not None:
        return _with_fitted_biases(weight, levels, codes, objective)
    factors = levels.places(codes)
    moments = objective.moments
    scales = levels.scales.clone()
    errors = weight - levels.values(codes)
    for g in range(scales.shape[1]):
        block = slice(g * levels.group, (g + 1) * levels.group)
        part = factors[:, block]
        pull = ((errors @ moments[:, block]) * part).sum(-1)
        curvature = ((part @ moments[block, block]) * part).sum(-1)
        wanted = scales[:, g] + torch.where(curvature > 0, pull / curvature, 0)
        step = refitted(scales[:, g], wanted) - scales[:, g]
        step = torch.where(2 * pull * step > curvature * step.square(), step, 0)
        scales[:, g] += step
        errors[:, block] -= part * step[:, None]
    return levels.with_scales(scales, levels.zero_points)


def _with_fitted_biases(
    weight: Tensor, levels: Levels, codes: Tensor, objective: Objective
) -> Levels:
    """Scale and bias of a group together: alone, each could hardly move against the other."""
    moments = objective.moments
    errors = weight - levels.values(codes)
    assert levels.offsets is not None
    scales = levels.scales.clone()
    offsets = levels.offsets.clone()
    for g in range(scales.shape[1]):
        block = slice(g * levels.group, (g + 1) * levels.group)
        part = codes[:, block]
        scale = scales[:, g]
        offset = offsets[:, g]
        inner = moments[block, block]
        pull = errors @ moments[:, block]
        scale_pull = (pull * part).sum(-1)
        bias_pull = pull.sum(-1)
        square = ((part @ inner) * part).sum(-1)
        mixed = (part @ inner).sum(-1)
        total = inner.sum()
        determinant = square * total - mixed.square()
        wanted = (scale_pull * total - bias_pull * mixed) / determinant
        step = refitted(scale, scale + torch.where(determinant > 0, wanted, 0)) - scale
        shift = (offset + (bias_pull - step * mixed) / total).half().float() - offset
        gain = 2 * (scale_pull * step + bias_pull * shift)
        gain -= square * step.square() + 2 * mixed * step * shift + total * shift.square()
        step = torch.where(gain > 0, step, 0)
        shift = torch.where(gain > 0, shift, 0)
        scales[:, g] += step
        offsets[:, g] += shift
        errors[:, block] -= part * step[:, None] + shift[:, None]
    return replace(levels, scales=scales, offsets=offsets)


def round_in_order(
    wanted: Tensor,
    weight: Tensor,
    mixing: Tensor,
    levels: Levels,
    columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Codes and errors (weight − value) of a block. Each column's wanted value shifts with the errors before it.

    `wanted`, which changes: the weights (rows, width) plus corrections for the errors of earlier blocks. `mixing`: how
    much of a column's error each later one absorbs. `levels`: of the whole weight, `columns`: the block's in it.
    """
    if runs_triton(weight.device):
        from kl_lens.weights.quantizers import triton_columns

        return triton_columns.round_in_order(wanted, weight, mixing, levels, columns)
    arrays = [t.cpu().numpy() for t in (wanted, weight, mixing)]
    codes = torch.empty(weight.shape)
    errors = torch.empty(weight.shape)
    _round_in_order(*arrays, *levels.arrays(columns), codes.numpy(), errors.numpy())  # type: ignore[call-arg]
    return codes.to(weight.device), errors.to(weight.device)


def descend(
    pull: Tensor,
    moments: Tensor,
    codes: Tensor,
    errors: Tensor,
    levels: Levels,
    columns: Tensor,
) -> None:
    """One round of coordinate descent over a block: each column moves to its best level while the others stay. `pull`:
    the whole row's errors times this block's columns of the moments; it changes, and so do `codes` and `errors`."""
    if runs_triton(pull.device):
        from kl_lens.weights.quantizers import triton_columns

        triton_columns.descend(pull, moments, codes, errors, levels, columns)
        return
    arrays = [t.cpu().numpy() for t in (pull, moments)]
    changed = [t.cpu() for t in (codes, errors)]
    _descend(*arrays, *levels.arrays(columns), *(t.numpy() for t in changed))
    codes.copy_(changed[0])
    errors.copy_(changed[1])


@njit(inline="always", error_model="numpy")
def _nearest(x, inverse, offset, lowest, highest, table):  # type: ignore[no-untyped-def]
    scaled = (x - offset) * inverse
    if table.shape[0] > 1:
        code = np.float32(0)
        for i in range(table.shape[0] - 1):
            code += np.float32(scaled > np.float32(0.5) * (table[i] + table[i + 1]))
        return code
    return min(max(np.float32(np.rint(scaled)), lowest), highest)


@njit(inline="always", error_model="numpy")
def _value(code, scale, offset, table):  # type: ignore[no-untyped-def]
    level = table[np.int32(code)] if table.shape[0] > 1 else code
    return level * scale + offset


@njit(parallel=True, fastmath={"contract", "nsz"}, error_model="numpy", cache=True)
def _round_in_order(  # type: ignore[no-untyped-def]
    wanted,
    weight,
    mixing,
    groups,
    scales,
    inverses,
    shifts,
    lowest,
    highest,
    table,
    codes,
    errors,
):
    rows, width = weight.shape
    for row in prange(rows):
        values = wanted[row]
        for j in range(width):
            g = groups[j]
            shift = shifts[row, g]
            code = _nearest(values[j], inverses[row, g], shift, lowest, highest, table)
            error = weight[row, j] - _value(code, scales[row, g], shift, table)
            codes[row, j] = code
            errors[row, j] = error
            for k in range(j + 1, width):
                values[k] += error * mixing[j, k]


@njit(parallel=True, fastmath={"contract", "nsz"}, error_model="numpy", cache=True)
def _descend(  # type: ignore[no-untyped-def]
    pull, moments, groups, scales, inverses, shifts, lowest, highest, table, codes, errors
):
    rows, width = pull.shape
    for row in prange(rows):
        pulls = pull[row]
        for j in range(width):
            g = groups[j]
            scale = scales[row, g]
            shift = shifts[row, g]
            before = _value(codes[row, j], scale, shift, table)
            x = before + pulls[j] / moments[j, j]
            code = _nearest(x, inverses[row, g], shift, lowest, highest, table)
            if code != codes[row, j]:
                step = _value(code, scale, shift, table) - before
                codes[row, j] = code
                errors[row, j] -= step
                for k in range(j + 1, width):
                    pulls[k] -= step * moments[j, k]
