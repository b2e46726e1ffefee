"""The short causal convolution in front of a state-space scan, one filter per channel, with SiLU behind it.

On CPU the library's grouped convolution is slow for this shape; a filter of four taps over rows of channels is
a few fused multiply-adds per element. Memory is (batch, time, channels), as the projection before it writes it.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange

from kl_lens.model.kernels.vector_math import FAST_MATH, plain, silu


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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, with_silu: bool = False
) -> torch.Tensor:
    """x: (batch, time, channels), weight: (channels, width) → (batch, time, channels), float32, on CPU."""
    y = torch.empty(x.shape, dtype=torch.float32)
    offset = np.zeros(x.shape[-1], np.float32) if bias is None else plain(bias)
    _convolve(plain(x), plain(weight.T), offset, with_silu, y.numpy())
    return y
