"""The scans of Mamba-1 and Mamba-2, the convolution in front of them and the norms around them, on a GPU, forward only.

Each kernel is one pass: its inputs are read where the projections left them, in float32, and what follows directly
(softplus, skip, gate, SiLU) is computed before anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 32  # per program of Mamba-1's scan
CHUNK = 32  # tokens that Mamba-2's scan takes at once


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """max(x, 0) + log(1 + e), e = exp(-|x|), by the series of 2·artanh(e/(2 + e)): nothing is lost where e is small."""
    e = tl.exp(-tl.abs(x))
    z = e / (2 + e)
    s = z * z
    high = 1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13)))
    return tl.maximum(x, 0.0) + 2 * z * (1 + s * (1 / 3 + s * (1 / 5 + s * high)))


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (1 + tl.exp(-x))


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    dt,
    bias,
    y,
    time,
    channels,
    s,
    d,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(sequences, channels, time) → (sequences, time, channels), with bias and softplus."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.program_id(2).to(tl.int64)
    inside = (channel < channels)[:, None] & (t < time)[None, :]
    step = tl.load(
        dt + sequence * s + channel[:, None] * d + t[None, :], mask=inside, other=0.0
    )
    step += tl.load(bias + channel, mask=channel < channels, other=0.0)[:, None]
    if SOFTPLUS:
        step = _softplus(step)
    target = y + (sequence * time + t)[:, None] * channels + channel[None, :]
    tl.store(target, tl.trans(step), mask=tl.trans(inside))


@triton.jit
def _selective(  # type: ignore[no-untyped-def]
    x,
    dt,
    bias,
    a,
    b,
    c,
    skip,
    gate,
    y,
    time,
    x_s,
    x_t,
    dt_s,
    dt_t,
    b_s,
    b_t,
    c_s,
    c_t,
    z_s,
    z_t,
    D: tl.constexpr,
    N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns one sequence and a block of channels; their states stay in registers while it walks through
    time. Strides are those of sequences (_s) and time (_t)."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    inside = channel < D
    tile = channel[:, None] * N + n[None, :]
    rate = tl.load(a + tile, mask=inside[:, None], other=0.0) * 1.4426950408889634
    offset = tl.load(bias + channel, mask=inside, other=0.0)
    through = tl.load(skip + channel, mask=inside, other=0.0)
    sequence = tl.program_id(1).to(tl.int64)
    state = tl.zeros((BLOCK, N), tl.float32)
    x += sequence * x_s + channel
    dt += sequence * dt_s + channel
    b += sequence * b_s + n
    c += sequence * c_s + n
    gate += sequence * z_s + channel
    y += sequence * time * D + channel
    # Inputs of later steps are loaded while the present one is computed.
    for t in tl.range(time, num_stages=5):
        step = tl.load(dt + t * dt_t, mask=inside, other=0.0) + offset
        value = tl.load(x + t * x_t, mask=inside, other=0.0)
        b_now = tl.load(b + t * b_t)
        c_now = tl.load(c + t * c_t)
        if SOFTPLUS:
            step = _softplus(step)
        state = (
            tl.exp2(step[:, None] * rate) * state
            + (step * value)[:, None] * b_now[None, :]
        )
        result = tl.sum(state * c_now[None, :], axis=1) + through * value
        if GATE:
            result *= _silu(tl.load(gate + t * z_t, mask=inside, other=0.0))
        tl.store(y + t * D, result, mask=inside)


def fits_selective(states: int) -> bool:
    """Triton's ranges are powers of two, so the number of states has to be one."""
    return states & (states - 1) == 0


def _rows(tensor: Tensor) -> Tensor:
    """In float32, with neighbours along the last axis."""
    tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def selective_scan_gpu(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Arguments and result as those of `selective_scan`, on a GPU."""
    batch, time, channels = x.shape
    zeros = x.new_zeros(channels, dtype=torch.float32)
    # As Mamba-1's projection leaves it: time innermost.
    if dt.stride(1) == 1 and dt.dtype == torch.float32:
        turned = torch.empty(batch, time, channels, dtype=torch.float32, device=x.device)
        grid: Any = (triton.cdiv(channels, 64), triton.cdiv(time, 64), batch)
        _turn[grid](
            dt,
            zeros if dt_bias is None else dt_bias.float(),
            turned,
            time,
            channels,
            dt.stride(0),
            dt.stride(2),
            SOFTPLUS=dt_softplus,
            BLOCK=64,
            num_warps=4,
        )
        dt = turned
        dt_bias = None
        dt_softplus = False
    x, dt, b, c = (_rows(tensor) for tensor in (x, dt, b, c))
    z = x if gate is None else _rows(gate)
    y = torch.empty(batch, time, channels, dtype=torch.float32, device=x.device)
    strides = [tensor.stride(axis) for tensor in (x, dt, b, c, z) for axis in (0, 1)]
    grid = (triton.cdiv(channels, CHANNELS), batch)
    _selective[grid](
        x,
        dt,
        zeros if dt_bias is None else dt_bias.float(),
        a.float().contiguous(),
        b,
        c,
        zeros if skip is None else skip.float(),
        z,
        y,
        time,
        *strides,
        D=channels,
        N=a.shape[1],
        SOFTPLUS=dt_softplus,
        GATE=gate is not None,
        BLOCK=CHANNELS,
        num_warps=1,
    )
    return y


@triton.jit
def _split(x):  # type: ignore[no-untyped-def]
    """x = (high + low) · inverse, both halves: see `triton_products`; here with one scale for the whole tile."""
    exponent = (tl.max(tl.max(tl.abs(x), 1), 0).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, 27)
    x = x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    high = x.to(tl.float16)
    return (
        high,
        (x - high.to(tl.float32)).to(tl.float16),
        ((exponent - 14) << 23).to(tl.float32, bitcast=True),
    )


@triton.jit
def _product(a, a_low, b, b_low):  # type: ignore[no-untyped-def]
    total = tl.dot(a_low, b)
    total = tl.dot(a, b_low, total)
    return tl.dot(a, b, total)


@triton.jit
def _chunks(  # type: ignore[no-untyped-def]
    x,
    dt,
    bias,
    a,
    b,
    c,
    skip,
    y,
    time,
    lowest,
    highest,
    per_group,
    x_s,
    x_t,
    dt_s,
    dt_t,
    b_s,
    b_t,
    c_s,
    c_t,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    Q: tl.constexpr,
):
    """One program owns one head of one sequence; its state (N, P) stays in registers while it walks through chunks of Q
    tokens, each of them four small products. Formulas as in `chunked_scan`."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, P)
    n = tl.arange(0, N)
    q = tl.arange(0, Q)
    rate = tl.load(a + head) * 1.4426950408889634
    offset = tl.load(bias + head)
    through = tl.load(skip + head)
    state = tl.zeros((N, P), tl.float32)
    x += sequence * x_s + head * P
    dt += sequence * dt_s + head
    b += sequence * b_s + (head // per_group) * N
    c += sequence * c_s + (head // per_group) * N
    y += (sequence * time * H + head) * P
    for first in range(0, time, Q):
        t = first + q
        inside = t < time
        step = tl.load(dt + t * dt_t, mask=inside, other=0.0) + offset
        if SOFTPLUS:
            step = _softplus(step)
        # A token behind the end has Δ = 0: it decays nothing and adds nothing.
        step = tl.where(inside, tl.minimum(tl.maximum(step, lowest), highest), 0.0)
        values = tl.load(
            x + t[:, None] * x_t + p[None, :], mask=inside[:, None], other=0.0
        )
        inputs = tl.load(
            b + t[:, None] * b_t + n[None, :], mask=inside[:, None], other=0.0
        )
        outputs = tl.load(
            c + t[:, None] * c_t + n[None, :], mask=inside[:, None], other=0.0
        )
        b_high, b_low, b_scale = _split(inputs)
        c_high, c_low, c_scale = _split(outputs)
        decay = step * rate
        so_far = tl.cumsum(decay, 0)
        whole = tl.sum(decay, 0)
        distance = tl.where(
            q[:, None] >= q[None, :], so_far[:, None] - so_far[None, :], float("-inf")
        )
        scores = _product(c_high, c_low, tl.trans(b_high), tl.trans(b_low))
        scores *= tl.exp2(distance) * (step * (b_scale * c_scale))[None, :]
        high, low, scale = _split(state)
        result = (
            _product(c_high, c_low, high, low)
            * (tl.exp2(so_far) * (scale * c_scale))[:, None]
        )
        s_high, s_low, s_scale = _split(scores)
        v_high, v_low, v_scale = _split(values)
        result += (
            _product(s_high, s_low, v_high, v_low) * (s_scale * v_scale)
            + through * values
        )
        tl.store(y + t[:, None] * (H * P) + p[None, :], result, mask=inside[:, None])
        high, low, scale = _split(values * (tl.exp2(whole - so_far) * step)[:, None])
        added = _product(tl.trans(b_high), tl.trans(b_low), high, low) * (scale * b_scale)
        state = state * tl.exp2(whole) + added


def fits_chunks(width: int, states: int) -> bool:
    """Tensor cores take powers of two, from sixteen up; a state has to stay in registers."""
    return (
        all(size >= 16 and size & (size - 1) == 0 for size in (width, states))
        and width * states <= 1 << 14
    )


def head_scan_gpu(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    skip: Tensor | None = None,
) -> Tensor:
    """Arguments and result as those of `head_scan`, on a GPU; `dt` as the projection gave it."""
    batch, time, heads, width = x.shape
    groups, states = b.shape[2:]
    zeros = x.new_zeros(heads, dtype=torch.float32)
    x = _rows(x)
    dt = _rows(dt)
    b = _rows(b)
    c = _rows(c)
    # Heads, and groups, of one token lie side by side.
    x, b, c = (t if t.stride(2) == t.shape[3] else t.contiguous() for t in (x, b, c))
    y = torch.empty(batch, time, heads, width, dtype=torch.float32, device=x.device)
    strides = [tensor.stride(axis) for tensor in (x, dt, b, c) for axis in (0, 1)]
    grid: Any = (heads, batch)
    _chunks[grid](
        x,
        dt,
        zeros if dt_bias is None else dt_bias.float(),
        a.float().contiguous(),
        b,
        c,
        zeros if skip is None else skip.float(),
        y,
        time,
        float(dt_limit[0]),
        float(dt_limit[1]),
        heads // groups,
        *strides,
        H=heads,
        P=width,
        N=states,
        SOFTPLUS=dt_softplus,
        Q=CHUNK,
        num_warps=4 if width * states <= 1 << 13 else 8,
        num_stages=1,
    )
    return y


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x,
    taps,
    bias,
    y,
    time,
    channels,
    x_s,
    x_t,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    d = tl.program_id(0) * BC + tl.arange(0, BC)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    sequence = tl.program_id(2).to(tl.int64)
    inside = d < channels
    total = tl.zeros((BT, BC), tl.float32)
    if BIAS:
        total += tl.load(bias + d, mask=inside, other=0.0)[None, :]
    for k in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + k
        mask = inside[None, :] & ((source >= 0) & (source < time))[:, None]
        part = tl.load(
            x + sequence * x_s + source[:, None] * x_t + d[None, :], mask=mask, other=0.0
        )
        total += part * tl.load(taps + d * WIDTH + k, mask=inside, other=0.0)[None, :]
    if SILU:
        total = _silu(total)
    offset = (sequence * time + t[:, None]) * channels + d[None, :]
    tl.store(y + offset, total, mask=inside[None, :] & (t < time)[:, None])


def causal_convolution_gpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    with_silu: bool = False,
) -> Tensor:
    """Arguments and result as those of `causal_convolution`, on a GPU."""
    batch, time, channels = x.shape
    x = _rows(x)
    taps = weight.float().contiguous()
    y = torch.empty(batch, time, channels, dtype=torch.float32, device=x.device)
    grid: Any = (triton.cdiv(channels, 128), triton.cdiv(time, 32), batch)
    _convolve[grid](
        x,
        taps,
        taps if bias is None else bias.float(),
        y,
        time,
        channels,
        x.stride(0),
        x.stride(1),
        WIDTH=weight.shape[1],
        BIAS=bias is not None,
        SILU=with_silu,
        BT=32,
        BC=128,
        num_warps=4,
    )
    return y


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    gate,
    weight,
    y,
    columns,
    x_stride,
    gate_stride,
    epsilon,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < columns
    values = tl.load(x + row * x_stride + k, mask=inside, other=0.0)
    if GATE:
        values *= _silu(tl.load(gate + row * gate_stride + k, mask=inside, other=0.0))
    mean = tl.sum(values * values, 0) / columns
    result = (
        values / tl.sqrt_rn(mean + epsilon) * tl.load(weight + k, mask=inside, other=0.0)
    )
    tl.store(y + row * columns + k, result, mask=inside)


def rms_norm_gpu(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    gate: Tensor | None = None,
) -> Tensor:
    """weight · v/√(mean v² + ε) with v = x, or x·SiLU(gate): float32, along the last axis."""
    columns = x.shape[-1]
    flat = _rows(x).reshape(-1, columns)
    gates = flat if gate is None else _rows(gate).reshape(-1, columns)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    grid: Any = (len(flat),)
    _normalise[grid](
        flat,
        gates,
        weight,
        y,
        columns,
        flat.stride(0),
        gates.stride(0),
        epsilon,
        GATE=gate is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return y
