"""The selective scan of Mamba-1 and the short causal convolution in front of scans, forward only.

    h[t] = exp(Δ[t]·A) ⊙ h[t-1] + Δ[t]·x[t] ⊗ B[t]        h: (channels, states)
    y[t] = h[t] · C[t]

In numba: one task per sequence and block of channels, the state of the block in cache, and an inner loop over channels
that the compiler turns into SIMD code. The convolution has one filter per channel and SiLU behind it; on CPU the
library's grouped convolution is slow for this shape, while a filter of four taps over rows of channels is a few fused
multiply-adds per element. Memory is (batch, time, channels), as the projection before it writes it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy import float32
from torch import Tensor
from torch.nn import functional

from kl_lens.base.compiling import njit, prange
from kl_lens.model.kernels.vector_math import (
    FAST_MATH,
    LOG2_E,
    exp2_decay,
    plain,
    silu,
    softplus,
)

# Channels per task. The states and rates of a block (2 × 16 × 256 × 4 bytes = 32 KB) stay in the L1 cache.
CHANNEL_BLOCK = 256


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _scan(x, dt, dt_bias, use_softplus, a, b, c, skip, gate, use_gate, y, block):  # type: ignore[no-untyped-def]
    """x, dt, gate, y: (batch, time, channels); a: (states, channels), times log2(e); b, c: (batch, time, states);
    dt_bias, skip: (channels,). The number of states is even."""
    batch, time, channels = x.shape
    states = a.shape[0]
    blocks = (channels + block - 1) // block
    for task in prange(batch * blocks):
        sequence = task // blocks
        first = (task % blocks) * block
        width = min(block, channels - first)
        # Own copies of a block's rows: contiguous, in cache, and known to the compiler not to overlap.
        rate = np.empty((states, width), float32)
        h = np.zeros((states, width), float32)
        for n in range(states):
            for d in range(width):
                rate[n, d] = a[n, first + d]
        step = np.empty(width, float32)
        inflow = np.empty(width, float32)
        total = np.empty(width, float32)
        for t in range(time):
            if use_softplus:
                for d in range(width):
                    step[d] = softplus(dt[sequence, t, first + d] + dt_bias[first + d])
            else:
                for d in range(width):
                    step[d] = dt[sequence, t, first + d] + dt_bias[first + d]
            for d in range(width):
                inflow[d] = step[d] * x[sequence, t, first + d]
                total[d] = skip[first + d] * x[sequence, t, first + d]
            # Two states at once: two independent chains of arithmetic hide each other's latency.
            for pair in range(states // 2):
                n = 2 * pair
                b_0 = b[sequence, t, n]
                b_1 = b[sequence, t, n + 1]
                c_0 = c[sequence, t, n]
                c_1 = c[sequence, t, n + 1]
                for d in range(width):
                    value_0 = exp2_decay(step[d] * rate[n, d]) * h[n, d] + inflow[d] * b_0
                    value_1 = (
                        exp2_decay(step[d] * rate[n + 1, d]) * h[n + 1, d]
                        + inflow[d] * b_1
                    )
                    h[n, d] = value_0
                    h[n + 1, d] = value_1
                    total[d] += value_0 * c_0 + value_1 * c_1
            if use_gate:
                for d in range(width):
                    y[sequence, t, first + d] = total[d] * silu(
                        gate[sequence, t, first + d]
                    )
            else:
                for d in range(width):
                    y[sequence, t, first + d] = total[d]


def selective_scan(
    x: Tensor,  # (batch, time, channels)
    dt: Tensor,  # time steps Δ ≥ 0, as x
    a: Tensor,  # decay rates A ≤ 0, (channels, states)
    b: Tensor,  # input vectors, (batch, time, states)
    c: Tensor,  # output vectors, as b
    *,
    dt_bias: Tensor | None = None,  # added to dt, (channels,)
    dt_softplus: bool = False,  # Δ is softplus(dt + dt_bias)
    skip: Tensor | None = None,  # skip · x is added to the outputs, (channels,)
    gate: Tensor | None = None,  # outputs are multiplied by SiLU(gate), as x
) -> Tensor:
    """The outputs, as x, in float32 on CPU, with what stands around the scan in a Mamba layer done on the way."""
    if a.shape[1] % 2:  # one that stays zero
        a, b, c = (functional.pad(tensor, (0, 1)) for tensor in (a, b, c))
    zeros = np.zeros(x.shape[2], float32)
    inputs = plain(x)
    y = np.empty(x.shape, float32)
    _scan(
        inputs,
        plain(dt),
        zeros if dt_bias is None else plain(dt_bias),
        dt_softplus,
        plain(a.T) * LOG2_E,
        plain(b),
        plain(c),
        zeros if skip is None else plain(skip),
        inputs if gate is None else plain(gate),
        gate is not None,
        y,
        CHANNEL_BLOCK,
    )
    return torch.from_numpy(y)


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _convolve(x, taps, bias, with_silu, y):  # type: ignore[no-untyped-def]
    """x, y: (batch, time, channels); taps: (width, channels); y[t] = bias + Σ taps[k]·x[t - width + 1 + k]."""
    batch, time, channels = x.shape
    width = taps.shape[0]
    for row in prange(batch * time):
        sequence = row // time
        t = row % time
        for d in range(channels):
            y[sequence, t, d] = bias[d]
        for k in range(width):
            source = t - width + 1 + k
            if source >= 0:
                for d in range(channels):
                    y[sequence, t, d] += taps[k, d] * x[sequence, source, d]
        if with_silu:
            for d in range(channels):
                y[sequence, t, d] = silu(y[sequence, t, d])


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    with_silu: bool = False,
) -> Tensor:
    """x: (batch, time, channels), weight: (channels, width) → (batch, time, channels), float32, on CPU."""
    y = torch.empty(x.shape, dtype=torch.float32)
    offset = np.zeros(x.shape[-1], float32) if bias is None else plain(bias)
    _convolve(plain(x), plain(weight.T), offset, with_silu, y.numpy())
    return y
