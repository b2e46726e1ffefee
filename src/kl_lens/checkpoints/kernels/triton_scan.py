"""The selective scan of Mamba-1 on a GPU, forward only: `selective_scan_reference` in Triton.

One program owns one sequence and a block of channels; their states stay in registers while it walks through time.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installations have no Triton
    triton = None

CHANNEL_BLOCK = 32

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _scan(x, dt, a, b, c, start, y, last, time, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, N)
        inside = channel < D
        tile = channel[:, None] * N + n[None, :]
        rate = tl.load(a + tile, mask=inside[:, None], other=0.0) * 1.4426950408889634
        sequence = tl.program_id(1).to(tl.int64)
        state = tl.load(start + sequence * (D * N) + tile, mask=inside[:, None], other=0.0)
        for t in range(time):
            row = sequence * time + t
            step = tl.load(dt + row * D + channel, mask=inside, other=0.0)
            inflow = step * tl.load(x + row * D + channel, mask=inside, other=0.0)
            b_t = tl.load(b + row * N + n)
            c_t = tl.load(c + row * N + n)
            state = tl.exp2(step[:, None] * rate) * state + inflow[:, None] * b_t[None, :]
            tl.store(y + row * D + channel, tl.sum(state * c_t[None, :], axis=1), mask=inside)
        tl.store(last + sequence * (D * N) + tile, state, mask=inside[:, None])


def is_available(device: torch.device, states: int) -> bool:
    """Triton's ranges are powers of two, so the state size has to be one."""
    return triton is not None and device.type == "cuda" and states & (states - 1) == 0


def selective_scan_gpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as those of `selective_scan`, on a GPU."""
    batch, time, channels = x.shape
    states = a.shape[1]

    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().contiguous()

    start = (
        x.new_zeros(batch, channels, states, dtype=torch.float32) if initial_state is None else initial_state
    )
    y = torch.empty(batch, time, channels, dtype=torch.float32, device=x.device)
    last = torch.empty(batch, channels, states, dtype=torch.float32, device=x.device)
    grid: Any = (triton.cdiv(channels, CHANNEL_BLOCK), batch)
    _scan[grid](
        plain(x), plain(dt), plain(a), plain(b), plain(c), plain(start), y, last, time,
        D=channels, N=states, BLOCK=CHANNEL_BLOCK, num_warps=1,
    )  # fmt: skip
    if skip is not None:
        y = torch.addcmul(y, x.float(), skip.float())
    if gate is not None:
        y = y * torch.nn.functional.silu(gate.float())
    return y, last
