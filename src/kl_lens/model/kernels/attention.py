"""Causal attention over short windows on CPU, forward only, in numba.

torch's own kernel computes whole square tiles of scores and spends much of its time around small products. Here one
task takes a few query rows of one head: their scores against all earlier keys, in panels of 64 keys; the softmax; and
the weighted values in the same way. Queries may share keys and values (grouped heads).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from kl_lens.base.compiling import njit, prange
from kl_lens.base.system import ON_ARM
from kl_lens.model.kernels.tile_product import WIDTH, accumulate, multiply
from kl_lens.model.kernels.vector_math import (
    FAST_MATH,
    LANES,
    LOG2_E,
    exp2_decay,
    largest,
    plain,
)

# Query rows per task. Their scores against a thousand keys are 64 KB.
ROWS = 16
# Windows outside these bounds are left to torch: its larger tiles win in the end, and tiny windows are not worth it.
SHORTEST = 128
LONGEST = 2048


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _exponentials(scores, count, lanes):  # type: ignore[no-untyped-def]
    """2^(score - the largest) of the first `count` scores, in place, zeros behind them; returns their sum."""
    top = largest(scores[:count], lanes)
    for c in range(LANES):
        lanes[c] = np.float32(0)
    for c in range(count, scores.shape[0]):
        scores[c] = np.float32(-1e30)
    for j in range(scores.shape[0] // LANES):
        part = scores[LANES * j : LANES * (j + 1)]
        for c in range(LANES):
            part[c] = exp2_decay(part[c] - top)
            lanes[c] += part[c]
    for c in range(count, scores.shape[0]):
        scores[c] = np.float32(0)
    total = np.float32(0)
    for c in range(LANES):
        total += lanes[c]
    return total


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _attend(queries, keys, values, scale, out):  # type: ignore[no-untyped-def]
    """queries: (batch, heads, time, width); out: (batch, time, heads, value width);
    keys: (batch, shared heads, panels of keys, depth, WIDTH), depth a multiple of four;
    values: (batch, shared heads, panels of columns, panels of keys · WIDTH, WIDTH)."""
    batch, heads, time, width = queries.shape
    sharing = heads // keys.shape[1]
    depth = keys.shape[3]
    blocks = (time + ROWS - 1) // ROWS
    for task in prange(batch * heads * blocks):
        sequence = task // (heads * blocks)
        head = (task // blocks) % heads
        first = (task % blocks) * ROWS
        last = min(time, first + ROWS)
        query = np.zeros((ROWS, depth), np.float32)
        for r in range(last - first):
            source = queries[sequence, head, first + r]
            row = query[r]
            for d in range(width):
                row[d] = source[d] * scale
        panels = (last + WIDTH - 1) // WIDTH
        scores = np.empty((ROWS, panels * WIDTH), np.float32)
        for panel in range(panels):
            tile = scores[:, panel * WIDTH : (panel + 1) * WIDTH]
            for r in range(0, ROWS, 4):
                multiply(query, r, keys[sequence, head // sharing, panel], tile, r)
        share = np.empty(ROWS, np.float32)
        lanes = np.empty(LANES, np.float32)
        for r in range(ROWS):
            share[r] = np.float32(1) / _exponentials(
                scores[r], min(first + r + 1, last), lanes
            )
        sums = np.empty((ROWS, WIDTH), np.float32)
        for panel in range(values.shape[2]):
            sums[:] = np.float32(0)
            # A stretch of keys at a time, which stays in the L1 cache for all rows.
            for part in range(panels):
                tile = scores[:, part * WIDTH : (part + 1) * WIDTH]
                weighted = values[
                    sequence, head // sharing, panel, part * WIDTH : (part + 1) * WIDTH
                ]
                for r in range(0, ROWS, 4):
                    accumulate(tile, r, weighted, sums, r)
            start = panel * WIDTH
            columns = min(WIDTH, out.shape[3] - start)
            for r in range(last - first):
                # A slice: an index that might be negative would keep the loop from becoming SIMD code.
                row = out[sequence, first + r, head, start : start + columns]
                source = sums[r]
                for c in range(columns):
                    row[c] = source[c] * share[r]


def is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether `causal_attention` computes this and is known to be faster than torch; that was measured on ARM only."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.float32
        and query.shape[2] == key.shape[2]
        and SHORTEST <= query.shape[2] <= LONGEST
        and ON_ARM
    )


def causal_attention(
    query: torch.Tensor,  # (batch, heads, time, width)
    key: torch.Tensor,  # (batch, shared heads, time, width); heads are a multiple of the shared ones
    value: torch.Tensor,  # (batch, shared heads, time, value width)
    scale: float | None = None,  # of the scores; 1/√width when not given
) -> torch.Tensor:
    """Attention of each position to itself and all before it, in float32 on CPU: (batch, time, heads, value width)."""
    batch, heads, time, width = query.shape
    shared = key.shape[1]
    padding = -time % WIDTH
    # Not where nothing is missing: it would copy.
    keys = key
    if padding or width % 4:
        keys = functional.pad(key, (0, -width % 4, 0, padding))
    keys = keys.reshape(batch, shared, -1, WIDTH, keys.shape[3]).transpose(3, 4)
    columns = -value.shape[3] % WIDTH
    values = value
    if padding or columns:
        values = functional.pad(value, (0, columns, 0, padding))
    values = values.reshape(batch, shared, time + padding, -1, WIDTH).transpose(2, 3)
    out = torch.empty(batch, time, heads, value.shape[3])
    size = 1 / math.sqrt(width) if scale is None else scale
    factor = np.float32(size * float(LOG2_E))
    _attend(plain(query), plain(keys), plain(values), factor, out.numpy())
    return out
