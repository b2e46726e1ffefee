"""The scans of `rounded_scan` on a GPU: one program owns a tile of rows of one head's state, in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kl_lens.model.states import HEAD, NUMBERS, StateFormat

ROWS = 8  # of a state per program, where rows do not share a scale
_INTEGERS, _FP8, _FP16, _BF16 = range(4)
_KINDS = {NUMBERS["fp8"]: _FP8, NUMBERS["fp16"]: _FP16, NUMBERS["bf16"]: _BF16}


@triton.jit
def _stored(  # type: ignore[no-untyped-def]
    v, largest, KIND: tl.constexpr, P: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr
):
    """A tile (P, N) as it comes back; GROUP numbers share a scale."""
    groups = tl.reshape(v, (P * N // GROUP, GROUP))
    if KIND == 2:
        groups = (
            tl.minimum(tl.maximum(groups, -largest), largest)
            .to(tl.float16)
            .to(tl.float32)
        )
    elif KIND == 3:
        groups = groups.to(tl.bfloat16).to(tl.float32)
    else:
        scale = (tl.max(tl.abs(groups), 1) / largest).to(tl.float16).to(tl.float32)
        levels = groups * tl.where(scale > 0, 1 / scale, 0.0)[:, None]
        levels = tl.minimum(tl.maximum(levels, -largest), largest)
        if KIND == 1:
            levels = levels.to(tl.float8e4nv).to(tl.float32)
        else:
            levels = (
                levels + 12582912.0
            ) - 12582912.0  # to the nearest integer, ties to even
        groups = levels * scale[:, None]
    return tl.reshape(groups, (P, N))


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    x,
    dt,
    a,
    b,
    c,
    skip,
    y,
    time,
    heads,
    width,
    states,
    per_group,
    groups,
    largest,
    BY_ROW: tl.constexpr,
    KIND: tl.constexpr,
    FEEDBACK: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """x, y: (sequences, time, heads, width); b, c: (sequences, time, groups, states). BY_ROW: rows have time steps,
    skip weights and decays of their own, as in Mamba-1, whose channels are rows of one head."""
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    row = tl.program_id(0) * P + tl.arange(0, P)
    n = tl.arange(0, N)
    inside = row < width
    real = n < states
    if BY_ROW:
        valid = inside[:, None] & real[None, :]
        rate = (
            tl.load(a + row[:, None] * states + n[None, :], mask=valid, other=0.0)
            * 1.4426950408889634
        )
        through = tl.load(skip + row, mask=inside, other=0.0)
        dt += sequence * time * width + row
    else:
        rate = tl.load(a + head) * 1.4426950408889634
        through = tl.load(skip + head)
        dt += sequence * time * heads + head
    x += (sequence * time * heads + head) * width + row
    y += (sequence * time * heads + head) * width + row
    b += (sequence * time * groups + head // per_group) * states + n
    c += (sequence * time * groups + head // per_group) * states + n
    state = tl.zeros((P, N), tl.float32)
    lost = tl.zeros((P, N), tl.float32)
    for t in tl.range(time, num_stages=4):
        value = tl.load(x + t * heads * width, mask=inside, other=0.0)
        into = tl.load(b + t * groups * states, mask=real, other=0.0)
        out = tl.load(c + t * groups * states, mask=real, other=0.0)
        if BY_ROW:
            step = tl.load(dt + t * width, mask=inside, other=0.0)
            state = (
                tl.exp2(step[:, None] * rate) * state
                + (step * value)[:, None] * into[None, :]
            )
        else:
            step = tl.load(dt + t * heads)
            state = tl.exp2(step * rate) * state + (step * value)[:, None] * into[None, :]
        if FEEDBACK:
            state += lost
        tl.store(
            y + t * heads * width,
            tl.sum(state * out[None, :], 1) + through * value,
            mask=inside,
        )
        stored = _stored(state, largest, KIND, P, N, GROUP)
        if FEEDBACK:
            lost = _stored(state - stored, largest, KIND, P, N, GROUP)
        state = stored


def rounded_scan_gpu(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    storage: StateFormat,
    *,
    skip: Tensor | None = None,
) -> Tensor:
    """Arguments and outputs as those of `rounded_scan`."""
    shape = x.shape
    if by_row := x.shape[3] == 1 and b.shape[2] == 1:
        x = x.transpose(2, 3)
    batch, time, heads, width = x.shape
    groups, states = b.shape[2:]
    zeros = torch.zeros(max(heads, width), device=x.device)
    x, dt, a, b, c = (tensor.float().contiguous() for tensor in (x, dt, a, b, c))
    y = torch.empty_like(x)
    size = triton.next_power_of_2(states)
    whole = storage.scales == HEAD and not by_row
    rows = triton.next_power_of_2(width)
    if whole:
        group = rows * size
    else:
        rows = min(ROWS, rows)
        sharing = storage.group(1, states)
        group = size if sharing == states else sharing
    grid: Any = (triton.cdiv(width, rows), heads, batch)
    _scan[grid](
        x,
        dt,
        a,
        b,
        c,
        zeros if skip is None else skip.float().contiguous(),
        y,
        time,
        heads,
        width,
        states,
        heads // groups,
        groups,
        storage.numbers.largest,
        BY_ROW=by_row,
        KIND=_KINDS.get(storage.numbers, _INTEGERS),
        FEEDBACK=storage.feedback,
        P=rows,
        N=size,
        GROUP=group,
        num_warps=1 if rows * size <= 2048 else 4,
    )
    return y.reshape(shape)
