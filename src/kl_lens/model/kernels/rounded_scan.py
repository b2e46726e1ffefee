"""The scans of Mamba-1 and Mamba-2 with a state that is rounded after every token, on CPU, in numba.

    v[t] = exp(Δ[t]·A) h[t-1] + Δ[t]·x[t] ⊗ B[t] (+ e[t-1])        y[t] = v[t] · C[t]
    h[t] = rounded(v[t])                                          (e[t] = rounded(v[t] − h[t]))

A runtime computes a token's output before it stores the state, so outputs are read before rounding. One task per
sequence and head; Mamba-1's channels are heads of width one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy import float32, int32
from torch import Tensor

from kl_lens.base.compiling import njit, prange
from kl_lens.model.kernels.vector_math import (
    _ROUNDER,
    FAST_MATH,
    LOG2_E,
    exp2_decay,
    float_bits,
    from_bits,
    plain,
)
from kl_lens.model.states import StateFormat

_POSITIVE = int32(0x7FFFFFFF)  # the bits of a float32 without its sign


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def _to_float(value, mantissa, smallest, unit):  # type: ignore[no-untyped-def]
    """To so many bits behind the point, ties to even; below `smallest` in steps of `unit`. Without a branch."""
    drop = int32(23) - mantissa
    bits: int32 = float_bits(value)  # type: ignore[call-arg]
    odd = int32(int32(bits >> drop) & int32(1))
    half = int32(int32(1) << int32(drop - int32(1)))
    normal = int32(int32(bits + odd + half - int32(1)) & int32(-(int32(1) << drop)))
    small = float_bits(((value / unit + _ROUNDER) - _ROUNDER) * unit)
    is_small = int32(int32(int32(bits & _POSITIVE) - float_bits(smallest)) >> int32(31))
    return from_bits(int32((small & is_small) | (normal & ~is_small)))


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _round_group(values, out, largest, mantissa, smallest, scaled):  # type: ignore[no-untyped-def]
    scale = float32(1)
    inverse = float32(1)
    if scaled:
        # Of positive floats, the larger one has the larger bits: a maximum as SIMD code.
        top = int32(0)
        for k in range(values.shape[0]):
            top = max(top, int32(float_bits(values[k]) & _POSITIVE))  # type: ignore[call-arg]
        scale = from_bits(top) / largest  # type: ignore[call-arg]
        scale = _to_float(scale, int32(10), float32(2.0**-14), float32(2.0**-24))
        inverse = float32(1) / scale if scale > 0 else float32(0)
    if mantissa == 0:
        for k in range(values.shape[0]):
            level = (values[k] * inverse + _ROUNDER) - _ROUNDER
            out[k] = min(max(level, -largest), largest) * scale
    else:
        unit = smallest / float32(int32(1) << mantissa)
        for k in range(values.shape[0]):
            level = _to_float(values[k] * inverse, mantissa, smallest, unit)
            out[k] = min(max(level, -largest), largest) * scale


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _scan(  # type: ignore[no-untyped-def]
    x, dt, a, b, c, skip, group, largest, mantissa, smallest, scaled, feedback, y, state
):
    """x, y: (batch, time, heads, width); dt: (batch, time, heads); a: (heads, 1 or states), times log2(e);
    b, c: (batch, time, groups, states); state: (batch, heads, 1 or 2, width · states), the last one and
    with feedback what it lost, as stored."""
    batch, time, heads, width = x.shape
    groups = b.shape[2]
    states = b.shape[3]
    for task in prange(batch * heads):
        sequence = task // heads
        head = task % heads
        inputs = head * groups // heads
        value = np.zeros(width * states, float32)
        memory = np.zeros(width * states, float32)
        lost = np.zeros(width * states, float32)
        decay = np.empty(states, float32)
        for t in range(time):
            step = dt[sequence, t, head]
            for n in range(a.shape[1]):
                decay[n] = exp2_decay(step * a[head, n])
            for n in range(a.shape[1], states):
                decay[n] = decay[0]
            into = b[sequence, t, inputs]
            out = c[sequence, t, inputs]
            for p in range(width):
                entering = x[sequence, t, head, p]
                inflow = step * entering
                row = value[p * states : (p + 1) * states]
                old = memory[p * states : (p + 1) * states]
                missing = lost[p * states : (p + 1) * states]
                for n in range(states):
                    row[n] = decay[n] * old[n] + inflow * into[n]
                if feedback:
                    for n in range(states):
                        row[n] += missing[n]
                total = float32(0)
                for n in range(states):
                    total += row[n] * out[n]
                y[sequence, t, head, p] = total + skip[head] * entering
            for first in range(0, width * states, group):
                part = value[first : first + group]
                stored = memory[first : first + group]
                _round_group(part, stored, largest, mantissa, smallest, scaled)
                if feedback:
                    error = lost[first : first + group]
                    for k in range(error.shape[0]):
                        part[k] -= stored[k]
                    _round_group(part, error, largest, mantissa, smallest, scaled)
        state[sequence, head, 0] = memory
        if feedback:
            state[sequence, head, 1] = lost


def rounded_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    storage: StateFormat,
    *,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x: (batch, time, heads, width); dt: (batch, time, heads), positive; a: (heads,) or (heads, states);
    b, c: (batch, time, groups, states). Returns outputs like x, and what is stored at the end:
    (batch, heads, 1 or with feedback 2, width, states)."""
    batch, _, heads, width = x.shape
    states = b.shape[3]

    y = np.empty(x.shape, float32)
    state = np.empty((batch, heads, 1 + storage.feedback, width * states), float32)
    numbers = storage.numbers
    _scan(
        plain(x),
        plain(dt),
        plain(a.reshape(heads, -1)) * LOG2_E,
        plain(b),
        plain(c),
        np.zeros(heads, float32) if skip is None else plain(skip),
        storage.group(width, states),
        float32(numbers.largest),
        int32(numbers.mantissa),
        float32(2.0**numbers.exponent),
        numbers.scaled,
        storage.feedback,
        y,
        state,
    )
    return torch.from_numpy(y), torch.from_numpy(state).unflatten(-1, (width, states))
