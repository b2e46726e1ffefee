"""The inner loops of `feedback.py` on a GPU: one program for a few rows of a block.

Errors only pass to later columns, so a column is final after its turn. The loops therefore carry only the wanted
values; codes and errors are computed from them at the end, for all columns at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit
def _nearest(  # type: ignore[no-untyped-def]
    x,
    inverse,
    shift,
    lowest,
    highest,
    table,
    ENTRIES: tl.constexpr,
):
    scaled = (x - shift) * inverse
    if ENTRIES > 1:
        code = tl.zeros_like(scaled)
        for i in tl.static_range(ENTRIES - 1):
            border = 0.5 * (tl.load(table + i) + tl.load(table + i + 1))
            code += tl.where(scaled > border, 1.0, 0.0)
        return code
    # Rounds half to even: beyond 1.5·2²³ a float32 holds whole numbers only.
    return (tl.minimum(tl.maximum(scaled, lowest), highest) + 12582912.0) - 12582912.0


@triton.jit
def _value(code, scale, shift, table, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    level = code
    if ENTRIES > 1:
        level = tl.load(table + code.to(tl.int32))
    return level * scale + shift


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    wanted,
    weight,
    mixing,
    groups,
    scales,
    inverses,
    shifts,
    table,
    codes,
    errors,
    rows,
    width,
    group_count,
    lowest,
    highest,
    ENTRIES: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    valid = row < rows
    inside = valid[:, None] & (column < width)[None, :]
    index = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(wanted + index, mask=inside, other=0.0)
    at_row = row.to(tl.int64) * group_count
    for j in range(width):
        at = at_row + tl.load(groups + j)
        scale = tl.load(scales + at, mask=valid, other=1.0)
        inverse = tl.load(inverses + at, mask=valid, other=1.0)
        shift = tl.load(shifts + at, mask=valid, other=0.0)
        x = tl.sum(tl.where(column[None, :] == j, values, 0.0), 1)
        code = _nearest(x, inverse, shift, lowest, highest, table, ENTRIES)
        exact = tl.load(weight + row.to(tl.int64) * width + j, mask=valid, other=0.0)
        error = exact - _value(code, scale, shift, table, ENTRIES)
        later = tl.load(
            mixing + j * width + column, mask=(column > j) & (column < width), other=0.0
        )
        values += error[:, None] * later[None, :]
    at = at_row[:, None] + tl.load(groups + column, mask=column < width, other=0)[None, :]
    scale = tl.load(scales + at, mask=inside, other=1.0)
    shift = tl.load(shifts + at, mask=inside, other=0.0)
    inverse = tl.load(inverses + at, mask=inside, other=1.0)
    code = _nearest(values, inverse, shift, lowest, highest, table, ENTRIES)
    exact = tl.load(weight + index, mask=inside, other=0.0)
    tl.store(codes + index, code, mask=inside)
    tl.store(
        errors + index, exact - _value(code, scale, shift, table, ENTRIES), mask=inside
    )


@triton.jit
def _descend(  # type: ignore[no-untyped-def]
    pull,
    moments,
    groups,
    scales,
    inverses,
    shifts,
    table,
    codes,
    errors,
    rows,
    width,
    group_count,
    lowest,
    highest,
    ENTRIES: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    valid = row < rows
    inside = valid[:, None] & (column < width)[None, :]
    index = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(pull + index, mask=inside, other=0.0)
    at_row = row.to(tl.int64) * group_count
    for j in range(width):
        at = at_row + tl.load(groups + j)
        scale = tl.load(scales + at, mask=valid, other=1.0)
        inverse = tl.load(inverses + at, mask=valid, other=1.0)
        shift = tl.load(shifts + at, mask=valid, other=0.0)
        code = tl.load(codes + row.to(tl.int64) * width + j, mask=valid, other=0.0)
        before = _value(code, scale, shift, table, ENTRIES)
        x = before + tl.sum(tl.where(column[None, :] == j, values, 0.0), 1) / tl.load(
            moments + j * width + j
        )
        code = _nearest(x, inverse, shift, lowest, highest, table, ENTRIES)
        step = _value(code, scale, shift, table, ENTRIES) - before
        later = tl.load(
            moments + j * width + column, mask=(column > j) & (column < width), other=0.0
        )
        values -= step[:, None] * later[None, :]
    at = at_row[:, None] + tl.load(groups + column, mask=column < width, other=0)[None, :]
    scale = tl.load(scales + at, mask=inside, other=1.0)
    shift = tl.load(shifts + at, mask=inside, other=0.0)
    inverse = tl.load(inverses + at, mask=inside, other=1.0)
    diagonal = tl.load(moments + column * width + column, mask=column < width, other=1.0)
    old = tl.load(codes + index, mask=inside, other=0.0)
    before = _value(old, scale, shift, table, ENTRIES)
    goal = before + values / diagonal[None, :]
    code = _nearest(goal, inverse, shift, lowest, highest, table, ENTRIES)
    step = _value(code, scale, shift, table, ENTRIES) - before
    error = tl.load(errors + index, mask=inside, other=0.0)
    tl.debug_barrier()  # other threads of the program may still be reading codes
    tl.store(codes + index, code, mask=inside)
    tl.store(errors + index, error - step, mask=inside)


def _launch(
    kernel: Any,
    first: list[Tensor],
    levels: Any,
    columns: Tensor,
    codes: Tensor,
    errors: Tensor,
) -> None:
    rows, width = codes.shape
    groups = (columns // levels.group).to(torch.int32)
    kernel[(triton.cdiv(rows, _ROWS),)](
        *first,
        groups,
        levels.scales.contiguous(),
        levels.inverses.contiguous(),
        levels.shifts.contiguous(),
        levels.entries,
        codes,
        errors,
        rows,
        width,
        levels.scales.shape[1],
        float(levels.lowest),
        float(levels.highest),
        ENTRIES=len(levels.entries),
        R=_ROWS,
        W=max(16, triton.next_power_of_2(width)),
        num_warps=2,
    )


def round_in_order(
    wanted: Tensor,
    weight: Tensor,
    mixing: Tensor,
    levels: Any,
    columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Like `feedback.round_in_order`, but `wanted` is not changed."""
    codes = torch.empty_like(weight)
    errors = torch.empty_like(weight)
    _launch(_round, [wanted.contiguous(), weight, mixing], levels, columns, codes, errors)
    return codes, errors


def descend(
    pull: Tensor,
    moments: Tensor,
    codes: Tensor,
    errors: Tensor,
    levels: Any,
    columns: Tensor,
) -> None:
    """Like `feedback.descend`, but `pull` is not changed."""
    _launch(_descend, [pull.contiguous(), moments], levels, columns, codes, errors)
