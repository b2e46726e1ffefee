"""Scans made of torch's operations, for autograd on any device.

The scan of Mamba-2 (one decay per head), in chunks of batched matrix products, also for GPUs that Triton's kernel does
not fit (CPUs have `head_scan`):

    h[t] = exp(Δ[t]·A) h[t-1] + Δ[t]·x[t] ⊗ B[t]        h: (heads, head width, states)
    y[t] = h[t] · C[t]

Inside a chunk of Q tokens the outputs are a masked Q × Q product, as in attention; between chunks only the state is
carried. B and C are shared by all heads of a group, so C·Bᵀ is formed once per group, and the decays are applied to x,
which makes each product one matmul over all heads of the group. No intermediate is larger than (batch, chunks, heads,
Q, Q).

In the selective scan of Mamba-1, torch would keep a copy of the whole text's gradient for every step that reads one
token of it. Here the recurrence is one operation, whose backward pass is the same recurrence from the end. It runs in
chunks side by side, and what leaves a chunk is then added to the next: 45 small operations for 512 tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 64


def chunked_scan(
    x: Tensor,  # (batch, time, heads, width)
    dt: Tensor,  # time steps Δ ≥ 0, after softplus and clamping, (batch, time, heads)
    a: Tensor,  # decay rates A ≤ 0, (heads,)
    b: Tensor,  # input vectors, (batch, time, groups, states)
    c: Tensor,  # output vectors, as b
) -> Tensor:
    """The outputs, as x, in the dtype of the inputs; differentiable, on any device."""
    batch, time, heads, width = x.shape
    groups, states = b.shape[2:]
    heads_per_group = heads // groups
    chunk = min(CHUNK, time)
    chunks = -(-time // chunk)
    padding = chunks * chunk - time

    # A padded token has Δ = 0: it decays nothing and adds nothing.
    inflow = x * dt[..., None]
    log_decay = dt * a
    if padding:
        inflow, b, c = (
            functional.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (inflow, b, c)
        )
        log_decay = functional.pad(log_decay, (0, 0, 0, padding))

    # (batch·chunks, groups, …): tokens are rows, the heads of a group lie side by side in the columns.
    inflow = inflow.reshape(batch * chunks, chunk, groups, heads_per_group, width)
    b = b.reshape(batch * chunks, chunk, groups, states).transpose(1, 2)
    c = c.reshape(batch * chunks, chunk, groups, states).transpose(1, 2)
    log_decay = log_decay.reshape(batch * chunks, chunk, heads).transpose(1, 2)
    cumulative = log_decay.contiguous().cumsum(-1)  # (batch·chunks, heads, chunk)

    by_head = inflow.reshape(batch * chunks, chunk, heads, width).transpose(1, 2)
    within = _weights_within(cumulative, c @ b.transpose(-1, -2)) @ by_head

    # What the chunk adds to the state by its end: (states × chunk) · (chunk × heads of the group · width).
    to_end = (cumulative[..., -1:] - cumulative).exp().transpose(1, 2)
    damped = inflow * to_end.reshape(batch * chunks, chunk, groups, heads_per_group, 1)
    damped = damped.flatten(3).transpose(1, 2)
    added = (b.transpose(-1, -2) @ damped).view(
        batch, chunks, groups, states, heads_per_group, width
    )

    # Between chunks: the plain recurrence, one step per chunk.
    decay_of_chunk = cumulative[..., -1].exp()
    decay_of_chunk = decay_of_chunk.view(batch, chunks, groups, 1, heads_per_group, 1)
    state = x.new_zeros(batch, groups, states, heads_per_group, width)
    entering = []
    for index in range(chunks):
        entering.append(state)
        state = state * decay_of_chunk[:, index] + added[:, index]
    before = torch.stack(entering, 1).flatten(0, 1).flatten(3)

    # What the state at the chunk's start still says to token t.
    carried = (c @ before).view(batch * chunks, groups, chunk, heads_per_group, width)
    from_start = cumulative.exp().view(batch * chunks, groups, heads_per_group, chunk)
    carried = carried * from_start.transpose(2, 3)[..., None]

    shape = (batch, chunks * chunk, heads, width)
    y = within.transpose(1, 2).reshape(shape) + carried.transpose(1, 2).reshape(shape)
    return y[:, :time]


def _weights_within(cumulative: Tensor, scores: Tensor) -> Tensor:
    """How much token t of a chunk hears of token s ≤ t: its score, damped by exp(cumulative[t] - cumulative[s]).

    cumulative: (chunks, heads, chunk); scores: (chunks, groups, chunk, chunk)."""
    chunk = cumulative.shape[-1]
    difference = cumulative[..., :, None] - cumulative[..., None, :]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=scores.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    damping = difference.masked_fill_(future, -torch.inf).exp_()
    damping = damping.unflatten(1, (scores.shape[1], -1))
    # exp's backward needs its result.
    tracked = torch.is_grad_enabled() and damping.requires_grad
    scores = scores[:, :, None]
    return (damping * scores if tracked else damping.mul_(scores)).flatten(1, 2)


def _states(decay: Tensor, inflow: Tensor) -> Tensor:
    """h[t] = decay[t] · h[t-1] + inflow[t] over the first axis; h[-1] is zero."""
    time = len(inflow)
    length = math.isqrt(time - 1) + 1
    padding = [0, 0] * (inflow.dim() - 1) + [0, -time % length]
    # (chunks, length, …)
    factors, states = (
        functional.pad(t, padding).unflatten(0, (-1, length))
        for t in (decay, inflow.clone())
    )
    for t in range(1, length):
        states[:, t].addcmul_(factors[:, t], states[:, t - 1])
    reach = factors.cumprod(1)  # of what enters a chunk, at every step of it
    for before, current, factor in zip(states, states[1:], reach[1:], strict=False):
        current.addcmul_(factor, before[-1])
    return states.flatten(0, 1)[:time]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, inflow: Tensor) -> Tensor:
        states = _states(decay, inflow)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        later = functional.pad(decay[1:], [0, 0] * (decay.dim() - 1) + [0, 1])
        flowing = _states(later.flip(0), gradients[0].flip(0)).flip(0)
        before = functional.pad(states[:-1], [0, 0] * (decay.dim() - 1) + [1, 0])
        return flowing * before, flowing


def tracked_scan(
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
    """Arguments and result of `selective_scan`, with gradients. What is between is computed again for them."""
    step = time_steps(dt, dt_bias, dt_softplus)
    y = checkpoint(_outputs, x, step, a, b, c, use_reentrant=False)
    y = y if skip is None else y + skip * x
    return y if gate is None else y * functional.silu(gate.float())


def time_steps(raw: Tensor, bias: Tensor | None, with_softplus: bool) -> Tensor:
    """Δ of what a projection gave."""
    step = raw.float() if bias is None else raw.float() + bias.float()
    return functional.softplus(step) if with_softplus else step


def _outputs(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    # (time, batch, …)
    x, step, b, c = (tensor.float().transpose(0, 1) for tensor in (x, step, b, c))
    decay = torch.exp(step[..., None] * a)  # (time, batch, channels, states)
    states = _Recurrence.apply(decay, (step * x)[..., None] * b[:, :, None])
    return torch.einsum("tbcs,tbs->btc", states, c)
