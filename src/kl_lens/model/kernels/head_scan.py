"""The scan of Mamba-2 (one decay per head) on CPU, forward only, in numba.

    h[t] = exp(Δ[t]·A) h[t-1] + Δ[t]·x[t] ⊗ B[t]        h: (heads, head width, states)
    y[t] = h[t] · C[t]

In short chunks of time: what the state before the chunk gives (C · h), what the chunk's own inputs give each other, and
the state after it (Bᵀ · x, decayed). Two thirds of the plain recurrence's arithmetic, and as matrix products, in which
every load is used four times. As products of a library (`chunked_scan`) it is slower than the recurrence on a CPU:
thousands of small ones, each run with all threads. One task per sequence and block of channels, its state in cache.
Tests hold it against the recurrence, token by token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy import float32
from torch import Tensor

from kl_lens.base.compiling import njit, prange
from kl_lens.model.kernels.tile_product import WIDTH, accumulate, multiply
from kl_lens.model.kernels.vector_math import FAST_MATH, LOG2_E, exp2_decay, plain

# Steps per chunk, a multiple of four: long enough for the products, short enough for what is quadratic in it.
CHUNK = 16


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _within(weights, inflow, y, begin, end):  # type: ignore[no-untyped-def]
    """y[t] += Σ weights[t, s]·inflow[s] over s ≤ t in columns begin to end; weights behind t are zero."""
    for t in range(CHUNK):
        row = y[t, begin:end]
        for quad in range(t // 4 + 1):
            s = 4 * quad
            w_0 = weights[t, s]
            w_1 = weights[t, s + 1]
            w_2 = weights[t, s + 2]
            w_3 = weights[t, s + 3]
            x_0 = inflow[s, begin:end]
            x_1 = inflow[s + 1, begin:end]
            x_2 = inflow[s + 2, begin:end]
            x_3 = inflow[s + 3, begin:end]
            for k in range(row.shape[0]):
                row[k] = (
                    row[k] + w_0 * x_0[k] + w_1 * x_1[k] + w_2 * x_2[k] + w_3 * x_3[k]
                )


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _head(x, first, dt, a, skip, scores, rate, weights, inflow, remaining, y, begin, end):  # type: ignore[no-untyped-def]
    """One head in one chunk: columns `begin` to `end` of inflow, remaining, y; `first` is the first one's place in x.

    x: (steps, all channels) and dt: (steps,), fewer than CHUNK at the sequence's end. `y` comes as C · h and leaves
    complete; `inflow` is Δ·x, `remaining` what the chunk's end has of it. Returns what is left of the old state."""
    steps = x.shape[0]
    total = float32(0)
    for t in range(CHUNK):
        if t < steps:
            total += dt[t] * a
        rate[t] = total
    for t in range(CHUNK):
        row = weights[t]
        score = scores[t]
        stop = t // 4 * 4 + 4
        for s in range(stop):
            row[s] = exp2_decay(min(rate[t] - rate[s], float32(0))) * score[s]
        for s in range(t + 1, stop):
            row[s] = float32(0)
    for t in range(steps):
        so_far = exp2_decay(rate[t])
        to_end = dt[t] * exp2_decay(total - rate[t])
        # Rows are cut here and not by the caller: a slice of columns would hide from the compiler that they are dense.
        source = x[t, first : first + end - begin]
        row = y[t, begin:end]
        flows = inflow[t, begin:end]
        stays = remaining[t, begin:end]
        for k in range(source.shape[0]):
            value = source[k]
            flows[k] = dt[t] * value
            stays[k] = to_end * value
            row[k] = so_far * row[k] + skip * value
    for t in range(steps, CHUNK):
        for k in range(begin, end):
            inflow[t, k] = float32(0)
            remaining[t, k] = float32(0)
    _within(weights, inflow, y, begin, end)
    return exp2_decay(total)


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _scores(b, c, out):  # type: ignore[no-untyped-def]
    """out = c · b for each chunk; shapes as in `_scan`, the first three axes taken together."""
    for chunk in prange(b.shape[0]):
        for t in range(CHUNK):
            row = out[chunk, t]
            for s in range(CHUNK):
                row[s] = float32(0)
            for n in range(b.shape[1]):
                factor = c[chunk, t, n]
                vector = b[chunk, n]
                for s in range(CHUNK):
                    row[s] = row[s] + factor * vector[s]


@njit(parallel=True, fastmath=FAST_MATH, error_model="numpy", cache=True)
def _scan(x, dt, a, b, c, scores, skip, y, head_width):  # type: ignore[no-untyped-def]
    """x, y: (batch, time, channels); dt: (batch, time, heads); a: (heads,), times log2(e); skip: (heads,);
    b: (batch, chunks, groups, states, CHUNK); c: (batch, chunks, groups, CHUNK, states), zero behind the end of time;
    scores: (batch, chunks, groups, CHUNK, CHUNK), c · b; states are a multiple of four.
    Blocks never cross the border between two groups; the lanes that a short block leaves over stay zero."""
    batch, time, channels = x.shape
    chunks = b.shape[1]
    groups = b.shape[2]
    states = b.shape[3]
    per_group = channels // groups
    blocks = (per_group + WIDTH - 1) // WIDTH
    for task in prange(batch * groups * blocks):
        sequence = task // (groups * blocks)
        group = (task // blocks) % groups
        offset = (task % blocks) * WIDTH
        first = group * per_group + offset
        width = min(WIDTH, per_group - offset)
        h = np.zeros((states, WIDTH), float32)
        result = np.zeros((CHUNK, WIDTH), float32)
        inflow = np.zeros((CHUNK, WIDTH), float32)
        remaining = np.zeros((CHUNK, WIDTH), float32)
        decay = np.zeros(WIDTH, float32)
        rate = np.zeros(CHUNK, float32)
        weights = np.zeros((CHUNK, CHUNK), float32)
        for chunk in range(chunks):
            start = chunk * CHUNK
            stop = min(time, start + CHUNK)
            for t in range(0, CHUNK, 4):
                multiply(c[sequence, chunk, group], t, h, result, t)
            k = 0
            while k < width:  # one head, or the part of it that lies in this block
                head = (first + k) // head_width
                end = min(width, (head + 1) * head_width - first)
                decay[k:end] = _head(
                    x[sequence, start:stop],
                    first + k,
                    dt[sequence, start:stop, head],
                    a[head],
                    skip[head],
                    scores[sequence, chunk, group],
                    rate,
                    weights,
                    inflow,
                    remaining,
                    result,
                    k,
                    end,
                )
                k = end
            for n in range(states):
                row = h[n]
                for k in range(WIDTH):
                    row[k] *= decay[k]
            for n in range(0, states, 4):
                accumulate(b[sequence, chunk, group], n, remaining, h, n)
            for t in range(stop - start):
                row = y[sequence, start + t, first : first + width]
                source = result[t]
                for k in range(width):
                    row[k] = source[k]


def head_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, skip: Tensor | None = None
) -> Tensor:
    """Arguments and result as those of `chunked_scan`, in float32 on CPU; `skip` · x is added to the outputs."""
    batch, time, heads, width = x.shape
    states = b.shape[3]
    channels = heads * width

    def in_chunks(vectors: Tensor) -> Tensor:
        """(batch, time, groups, states) → (batch, chunks, groups, CHUNK, states), padded with zeros."""
        padded = torch.nn.functional.pad(
            vectors.detach().float(), (0, -states % 4, 0, 0, 0, -time % CHUNK)
        )
        return padded.unflatten(1, (-1, CHUNK)).transpose(2, 3).contiguous()

    inputs = in_chunks(b).transpose(3, 4).contiguous()
    outputs = in_chunks(c)
    # Not as a batched product of torch: one library call for each of hundreds of tiny ones took as long as the scan.
    scores = np.empty((*inputs.shape[:3], CHUNK, CHUNK), float32)
    _scores(
        inputs.flatten(0, 2).numpy(),
        outputs.flatten(0, 2).numpy(),
        scores.reshape(-1, CHUNK, CHUNK),
    )
    y = np.empty((batch, time, channels), float32)
    _scan(
        plain(x).reshape(batch, time, channels),
        plain(dt),
        plain(a) * LOG2_E,
        inputs.numpy(),
        outputs.numpy(),
        scores,
        np.zeros(heads, float32) if skip is None else plain(skip),
        y,
        width,
    )
    return torch.from_numpy(y).view(batch, time, heads, width)
