"""Triton kernels of the selective scan: sequential in time, parallel over batch and channels.

One program owns one sequence and a block of channels; their states stay in registers. The forward
pass stores every state so that the backward pass, which walks time in reverse, never recomputes:
a float32 copy of [b, l, d, n] per layer, which a data-centre GPU has room for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS_PER_PROGRAM = 32
WARPS = 1
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _forward(
    x,
    dt,
    a,
    b,
    c,
    y,
    states,
    length,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    tile = channel[:, None] * N + n[None, :]
    first = tl.program_id(1).to(tl.int64) * length
    rate = tl.load(a + tile) * LOG2_E
    state = tl.zeros([BLOCK, N], dtype=tl.float32)

    next_x = tl.load(x + first * D + channel)
    next_dt = tl.load(dt + first * D + channel)
    next_b = tl.load(b + first * N + n)
    next_c = tl.load(c + first * N + n)
    for t in range(length):
        row = first + t
        x_t = next_x.to(tl.float32)
        dt_t = next_dt.to(tl.float32)
        b_t = next_b.to(tl.float32)
        c_t = next_c.to(tl.float32)
        ahead = first + tl.minimum(
            t + 1, length - 1
        )  # fetch the next step while this one computes
        next_x = tl.load(x + ahead * D + channel)
        next_dt = tl.load(dt + ahead * D + channel)
        next_b = tl.load(b + ahead * N + n)
        next_c = tl.load(c + ahead * N + n)

        state = (
            tl.exp2(dt_t[:, None] * rate) * state + (dt_t * x_t)[:, None] * b_t[None, :]
        )
        tl.store(states + row * (D * N) + tile, state)
        tl.store(y + row * D + channel, tl.sum(state * c_t[None, :], axis=1))


@triton.jit
def _backward(
    dy,
    x,
    dt,
    a,
    b,
    c,
    states,
    dx,
    ddt,
    da,
    db,
    dc,
    length,
    rows,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    tile = channel[:, None] * N + n[None, :]
    sequence = tl.program_id(1).to(tl.int64)
    first = sequence * length
    rate = tl.load(a + tile)
    # Each channel block writes its own share of db and dc; the caller adds the shares.
    share = block.to(tl.int64) * rows * N

    d_state = tl.zeros([BLOCK, N], dtype=tl.float32)
    d_rate = tl.zeros([BLOCK, N], dtype=tl.float32)
    last = first + length - 1
    state = tl.load(states + last * (D * N) + tile)
    before = tl.load(states + tl.maximum(last - 1, first) * (D * N) + tile)
    next_x = tl.load(x + last * D + channel)
    next_dt = tl.load(dt + last * D + channel)
    next_b = tl.load(b + last * N + n)
    next_c = tl.load(c + last * N + n)
    next_dy = tl.load(dy + last * D + channel)
    for step in range(length):
        t = length - 1 - step
        row = first + t
        x_t = next_x.to(tl.float32)
        dt_t = next_dt.to(tl.float32)
        b_t = next_b.to(tl.float32)
        c_t = next_c.to(tl.float32)
        dy_t = next_dy.to(tl.float32)
        previous = tl.where(t > 0, before, 0.0)
        ahead = first + tl.maximum(t - 1, 0)
        before = tl.load(states + (first + tl.maximum(t - 2, 0)) * (D * N) + tile)
        next_x = tl.load(x + ahead * D + channel)
        next_dt = tl.load(dt + ahead * D + channel)
        next_b = tl.load(b + ahead * N + n)
        next_c = tl.load(c + ahead * N + n)
        next_dy = tl.load(dy + ahead * D + channel)

        tl.store(dc + share + row * N + n, tl.sum(state * dy_t[:, None], axis=0))
        d_state += dy_t[:, None] * c_t[None, :]
        decay = tl.exp2(dt_t[:, None] * rate * LOG2_E)
        d_exponent = d_state * previous * decay  # gradient of dt_t * a
        d_rate += d_exponent * dt_t[:, None]
        fed = tl.sum(d_state * b_t[None, :], axis=1)
        tl.store(
            db + share + row * N + n, tl.sum(d_state * (dt_t * x_t)[:, None], axis=0)
        )
        tl.store(dx + row * D + channel, fed * dt_t)
        tl.store(ddt + row * D + channel, tl.sum(d_exponent * rate, axis=1) + fed * x_t)
        d_state = d_state * decay
        state = previous
    tl.store(da + sequence * (D * N) + tile, d_rate)


@torch.library.custom_op("kl_lens_recipe::scan", mutates_args=())
def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """y in x's dtype, and every state [b, l, d, n] in float32."""
    x, dt, a, b, c = (t.contiguous() for t in (x, dt, a, b, c))
    batch, length, width = x.shape
    y = torch.empty_like(x)
    states = x.new_empty(batch, length, *a.shape, dtype=torch.float32)
    grid = (width // CHANNELS_PER_PROGRAM, batch)
    _forward[grid](
        x,
        dt,
        a,
        b,
        c,
        y,
        states,
        length,
        D=width,
        N=a.shape[1],
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=WARPS,
    )
    return y, states


@scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    states = x.new_empty(x.shape[0], x.shape[1], *a.shape, dtype=torch.float32)
    return x.new_empty(x.shape), states


@torch.library.custom_op("kl_lens_recipe::scan_backward", mutates_args=())
def scan_backward(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c."""
    dy, x, dt, a, b, c = (t.contiguous() for t in (dy, x, dt, a, b, c))
    batch, length, width = x.shape
    blocks = width // CHANNELS_PER_PROGRAM
    dx = torch.empty_like(x)
    ddt = torch.empty_like(dt)
    da = a.new_empty(batch, *a.shape)
    db = a.new_empty(blocks, *b.shape)
    dc = a.new_empty(blocks, *c.shape)
    _backward[(blocks, batch)](
        dy,
        x,
        dt,
        a,
        b,
        c,
        states,
        dx,
        ddt,
        da,
        db,
        dc,
        length,
        batch * length,
        D=width,
        N=a.shape[1],
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=WARPS,
    )
    return dx, ddt, da.sum(0), db.sum(0).to(b.dtype), dc.sum(0).to(c.dtype)


@scan_backward.register_fake
def _(
    dy: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        dt.new_empty(dt.shape),
        a.new_empty(a.shape),
        b.new_empty(b.shape),
        c.new_empty(c.shape),
    )


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradients(ctx, dy, _d_states):
    return scan_backward(dy, *ctx.saved_tensors)


scan.register_autograd(_gradients, setup_context=_remember)
