"""The selective scan of Mamba-1 with gradients, and the chunked form of Mamba-2.

``selective_scan`` runs a Triton kernel on a GPU and ``plain_selective_scan``, the recurrence as
written in the paper, everywhere else. ``check.py`` compares the two, values and gradients.

Shapes: b batch, l time, d channels, n state, h heads, p channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import scan_kernels
except ImportError:  # no Triton: a CPU-only installation
    scan_kernels = None


def plain_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """h_t = exp(dt_t a) h_{t-1} + dt_t b_t x_t;  y_t = c_t . h_t, one step at a time in float32.

    x, dt [b, l, d]; a [d, n]; b, c [b, l, n] -> y [b, l, d] in x's dtype.
    """
    dtype = x.dtype
    x = x.float()
    dt = dt.float()
    b = b.float()
    c = c.float()
    state = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * a)
        state = decay * state + (dt[:, t] * x[:, t])[:, :, None] * b[:, t, None, :]
        outputs.append((state * c[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1).to(dtype)


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``plain_selective_scan``, by the Triton kernels when the tensors are on a GPU."""
    if x.is_cuda and scan_kernels is not None:
        y, _states = scan_kernels.scan(x, dt, a, b, c)
        return y
    return plain_selective_scan(x, dt, a, b, c)


def chunked_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int
) -> Tensor:
    """Mamba-2's scan (one decay per head, one group of b and c) as batched matrix products.

    x [b, l, h, p]; dt [b, l, h] float32; a [h]; b, c [b, l, n] -> y [b, l, h, p].
    """
    batch, length, heads, width = x.shape
    padding = -length % chunk
    if padding:  # zero time steps neither decay the state nor feed it
        x, dt, b, c = (
            torch.nn.functional.pad(t, [0, 0] * (t.dim() - 2) + [0, padding])
            for t in (x, dt, b, c)
        )
    chunks = (length + padding) // chunk
    dtype = x.dtype

    b = b.reshape(batch, chunks, chunk, -1)
    c = c.reshape(batch, chunks, chunk, -1)
    log_decay = (
        (dt * a).reshape(batch, chunks, chunk, heads).transpose(2, 3)
    )  # [b, chunks, h, l]
    since_start = log_decay.cumsum(-1)
    driven = (x * dt[..., None]).to(dtype).reshape(batch, chunks, chunk, heads, width)

    # 1. Within a chunk: a masked, decayed product, as in attention.
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = (
        since_start[..., :, None] - since_start[..., None, :]
    )  # [b, chunks, h, to, from]
    decay = torch.exp(between.masked_fill(~causal, float("-inf")))
    scores = c @ b.transpose(-1, -2)  # [b, chunks, to, from], shared by the heads
    inside = (scores[:, :, None] * decay).to(dtype) @ driven.transpose(
        2, 3
    )  # [b, chunks, h, l, p]

    # 2. What each chunk adds to the state by its end.
    until_end = torch.exp(since_start[..., -1:] - since_start).transpose(
        2, 3
    )  # [b, chunks, l, h]
    weighted = (
        (driven * until_end[..., None])
        .to(dtype)
        .reshape(batch, chunks, chunk, heads * width)
    )
    added = weighted.transpose(-1, -2) @ b  # [b, chunks, h p, n]

    # 3. The state each chunk starts from: a sum over the chunks before it.
    ends = since_start[..., -1].transpose(1, 2).cumsum(-1)  # [b, h, chunks]
    starts = ends - since_start[..., -1].transpose(1, 2)
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    carry = torch.exp(
        (starts[..., :, None] - ends[..., None, :]).masked_fill(~earlier, float("-inf"))
    )
    added = added.reshape(batch, chunks, heads, -1).transpose(1, 2)  # [b, h, chunks, p n]
    state = (
        (carry.to(dtype) @ added)
        .transpose(1, 2)
        .reshape(batch, chunks, heads * width, -1)
    )

    # 4. What that state says inside the chunk.
    outside = (c @ state.transpose(-1, -2)).reshape(batch, chunks, chunk, heads, width)
    outside = outside * torch.exp(since_start).transpose(2, 3)[..., None]
    y = inside.transpose(2, 3) + outside
    return y.reshape(batch, chunks * chunk, heads, width)[:, :length].to(dtype)
