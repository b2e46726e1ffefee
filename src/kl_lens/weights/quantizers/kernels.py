"""The two inner loops of error feedback, over the columns of one block: Triton on a GPU, else numba on the CPU.

Rows do not depend on each other. Both loops change `codes` and `errors` in place and leave columns outside the
block to matrix products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from kl_lens.base.accelerators import runs_triton


def round_in_order(
    wanted: torch.Tensor, weight: torch.Tensor, mixing: torch.Tensor, levels: Any, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and errors (weight − value) of a block. Each column's wanted value shifts with the errors before it.

    Args:
        wanted: (rows, width), the weights plus corrections for the errors of earlier blocks. Changed.
        weight: (rows, width).
        mixing: (width, width), upper triangular: how much of a column's error each later one absorbs.
        levels: the `Levels` of the whole weight.
        columns: (width,), the block's columns in it.
    """
    if runs_triton(weight.device):
        from kl_lens.weights.quantizers import triton_columns

        return triton_columns.round_in_order(wanted, weight, mixing, levels, columns)
    given = [t.cpu().numpy() for t in (wanted, weight, mixing)]
    codes, errors = torch.empty(weight.shape), torch.empty(weight.shape)
    _round_in_order(*given, *levels.arrays(columns), codes.numpy(), errors.numpy())  # type: ignore[call-arg]
    return codes.to(weight.device), errors.to(weight.device)


def descend(
    pull: torch.Tensor, moments: torch.Tensor, codes: torch.Tensor, errors: torch.Tensor, levels: Any,
    columns: torch.Tensor,
) -> None:  # fmt: skip
    """One round of coordinate descent over a block: each column moves to its best level while the others stay.

    Args:
        pull: (rows, width), the whole row's errors times this block's columns of the moments. Changed.
        moments: (width, width), the block's own.
        codes, errors: (rows, width). Changed.
        levels, columns: as above.
    """
    if runs_triton(pull.device):
        from kl_lens.weights.quantizers import triton_columns

        triton_columns.descend(pull, moments, codes, errors, levels, columns)
        return
    given, changed = [t.cpu().numpy() for t in (pull, moments)], [t.cpu() for t in (codes, errors)]
    _descend(*given, *levels.arrays(columns), *(t.numpy() for t in changed))
    for there, here in zip((codes, errors), changed, strict=True):
        there.copy_(here)


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
    wanted, weight, mixing, groups, scales, inverses, shifts, lowest, highest, table, codes, errors
):
    rows, width = weight.shape
    for row in prange(rows):
        own = wanted[row]
        for j in range(width):
            g = groups[j]
            code = _nearest(own[j], inverses[row, g], shifts[row, g], lowest, highest, table)
            error = weight[row, j] - _value(code, scales[row, g], shifts[row, g], table)
            codes[row, j] = code
            errors[row, j] = error
            for k in range(j + 1, width):
                own[k] += error * mixing[j, k]


@njit(parallel=True, fastmath={"contract", "nsz"}, error_model="numpy", cache=True)
def _descend(  # type: ignore[no-untyped-def]
    pull, moments, groups, scales, inverses, shifts, lowest, highest, table, codes, errors
):
    rows, width = pull.shape
    for row in prange(rows):
        own = pull[row]
        for j in range(width):
            g = groups[j]
            scale, offset = scales[row, g], shifts[row, g]
            before = _value(codes[row, j], scale, offset, table)
            code = _nearest(before + own[j] / moments[j, j], inverses[row, g], offset, lowest, highest, table)
            if code != codes[row, j]:
                step = _value(code, scale, offset, table) - before
                codes[row, j] = code
                errors[row, j] -= step
                for k in range(j + 1, width):
                    own[k] -= step * moments[j, k]
