"""The scan of Mamba-2 (one decay per head) on CPU, forward only: the recurrence itself, in numba.

    h[t] = exp(Δ[t]·A) h[t-1] + Δ[t]·x[t] ⊗ B[t]        h: (heads, head width, states)
    y[t] = h[t] · C[t]

On paper the chunked form (`chunked_scan`) is made of matrix products and should win. On a CPU those products are
thousands of small ones, each run with all threads, and the recurrence does not need more arithmetic than they do: it is
one to four times faster, and does not collapse when another process wants a core. One task per sequence and block of
channels, the block's state in cache, and an inner loop over channels that the compiler turns into SIMD code. The
reference is `chunked_scan_reference`.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kl_lens.checkpoints.kernels.vector_math import FAST_MATH, LOG2_E, exp2_clamped

# Channels per task. A constant: the compiler then sees that the rows of the state do not overlap, and takes four at
# once. 64 channels of 128 states are 32 KB, half of an L1 cache.
WIDTH = 64


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _scan(x, dt, a, b, c, skip, state, y, head_width):  # type: ignore[no-untyped-def]
    """x, y: (batch, time, channels); dt: (batch, time, heads); a: (heads,), times log2(e); skip: (heads,);
    b, c: (batch, time, groups, states); state: (batch, states, channels), the first state in, the last one out.
    Blocks never cross the border between two groups; the lanes that a short block leaves over stay zero."""
    batch, time, channels = x.shape
    groups, states = b.shape[2], b.shape[3]
    per_group = channels // groups
    blocks = (per_group + WIDTH - 1) // WIDTH
    for task in prange(batch * groups * blocks):
        sequence = task // (groups * blocks)
        group = (task // blocks) % groups
        offset = (task % blocks) * WIDTH
        first = group * per_group + offset
        width = min(WIDTH, per_group - offset)
        h = np.zeros(states * WIDTH, np.float32)
        for n in range(states):
            for d in range(width):
                h[n * WIDTH + d] = state[sequence, n, first + d]
        decay = np.zeros(WIDTH, np.float32)
        inflow = np.zeros(WIDTH, np.float32)
        total = np.zeros(WIDTH, np.float32)
        for t in range(time):
            d = 0
            while d < width:  # one head, or the part of it that lies in this block
                head = (first + d) // head_width
                end = min(width, (head + 1) * head_width - first)
                step = dt[sequence, t, head]
                keep = exp2_clamped(step * a[head])
                for k in range(d, end):
                    decay[k] = keep
                    inflow[k] = step * x[sequence, t, first + k]
                    total[k] = skip[head] * x[sequence, t, first + k]
                d = end
            for quad in range(states // 4):
                n = 4 * quad
                row = n * WIDTH
                b_0, b_1 = b[sequence, t, group, n], b[sequence, t, group, n + 1]
                b_2, b_3 = b[sequence, t, group, n + 2], b[sequence, t, group, n + 3]
                c_0, c_1 = c[sequence, t, group, n], c[sequence, t, group, n + 1]
                c_2, c_3 = c[sequence, t, group, n + 2], c[sequence, t, group, n + 3]
                for k in range(WIDTH):
                    value_0 = decay[k] * h[row + k] + inflow[k] * b_0
                    value_1 = decay[k] * h[row + WIDTH + k] + inflow[k] * b_1
                    value_2 = decay[k] * h[row + 2 * WIDTH + k] + inflow[k] * b_2
                    value_3 = decay[k] * h[row + 3 * WIDTH + k] + inflow[k] * b_3
                    h[row + k] = value_0
                    h[row + WIDTH + k] = value_1
                    h[row + 2 * WIDTH + k] = value_2
                    h[row + 3 * WIDTH + k] = value_3
                    total[k] += (value_0 * c_0 + value_1 * c_1) + (value_2 * c_2 + value_3 * c_3)
            for n in range(states // 4 * 4, states):
                b_0, c_0 = b[sequence, t, group, n], c[sequence, t, group, n]
                for k in range(WIDTH):
                    value_0 = decay[k] * h[n * WIDTH + k] + inflow[k] * b_0
                    h[n * WIDTH + k] = value_0
                    total[k] += value_0 * c_0
            for k in range(width):
                y[sequence, t, first + k] = total[k]
        for n in range(states):
            for d in range(width):
                state[sequence, n, first + d] = h[n * WIDTH + d]


def head_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    skip: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan in float32 on CPU.

    Args:
        x: inputs, (batch, time, heads, width).
        dt: time steps Δ ≥ 0, after softplus and clamping, (batch, time, heads).
        a: decay rates A ≤ 0, (heads,).
        b: input vectors, (batch, time, groups, states).
        c: output vectors, (batch, time, groups, states).
        initial_state: (batch, heads, width, states); zeros when not given.
        skip: adds skip · x to the outputs, (heads,).

    Returns:
        outputs (batch, time, heads, width) and the last state (batch, heads, width, states), both float32.
    """
    batch, time, heads, width = x.shape
    states = b.shape[3]

    def plain(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().to(torch.float32).contiguous().numpy()

    if initial_state is None:
        state = np.zeros((batch, states, heads * width), np.float32)
    else:
        state = plain(initial_state.reshape(batch, heads * width, states).transpose(1, 2)).copy()
    y = np.empty((batch, time, heads * width), np.float32)
    _scan(
        plain(x).reshape(batch, time, heads * width), plain(dt), plain(a) * LOG2_E, plain(b), plain(c),
        np.zeros(heads, np.float32) if skip is None else plain(skip), state, y, width,
    )  # fmt: skip
    last = torch.from_numpy(state).transpose(1, 2).reshape(batch, heads, width, states)
    return torch.from_numpy(y).view(batch, time, heads, width), last
