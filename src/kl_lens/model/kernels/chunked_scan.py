"""The scan of Mamba-2 (one decay per head), in chunks of batched matrix products: for autograd, and for GPUs that
Triton's kernel does not fit. CPUs have `head_scan`.

    h[t] = exp(Δ[t]·A) h[t-1] + Δ[t]·x[t] ⊗ B[t]        h: (heads, head width, states)
    y[t] = h[t] · C[t]

Inside a chunk of Q tokens the outputs are a masked Q × Q product, as in attention; between chunks only the state is
carried. B and C are shared by all heads of a group, so C·Bᵀ is formed once per group, and the decays are applied to x,
which makes each product one matmul over all heads of the group. No intermediate is larger than (batch, chunks, heads,
Q, Q).
"""

from __future__ import annotations

import torch

CHUNK = 64


def chunked_scan(
    x: torch.Tensor,  # (batch, time, heads, width)
    dt: torch.Tensor,  # time steps Δ ≥ 0, after softplus and clamping, (batch, time, heads)
    a: torch.Tensor,  # decay rates A ≤ 0, (heads,)
    b: torch.Tensor,  # input vectors, (batch, time, groups, states)
    c: torch.Tensor,  # output vectors, as b
) -> torch.Tensor:
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
        inflow, b, c = (torch.nn.functional.pad(each, (0, 0, 0, 0, 0, padding)) for each in (inflow, b, c))
        log_decay = torch.nn.functional.pad(log_decay, (0, 0, 0, padding))

    # (batch·chunks, groups, …): tokens are rows, the heads of a group lie side by side in the columns.
    inflow = inflow.reshape(batch * chunks, chunk, groups, heads_per_group, width)
    b = b.reshape(batch * chunks, chunk, groups, states).transpose(1, 2)
    c = c.reshape(batch * chunks, chunk, groups, states).transpose(1, 2)
    log_decay = log_decay.reshape(batch * chunks, chunk, heads).transpose(1, 2).contiguous()
    cumulative = log_decay.cumsum(-1)  # (batch·chunks, heads, chunk)

    # Within the chunk: token t hears token s ≤ t, damped by exp(cumulative[t] - cumulative[s]).
    difference = cumulative[..., :, None] - cumulative[..., None, :]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    damping = difference.masked_fill_(future, -torch.inf).exp_()
    scores = c @ b.transpose(-1, -2)  # (batch·chunks, groups, chunk, chunk)
    damping = damping.view(batch * chunks, groups, heads_per_group, chunk, chunk)
    tracked = torch.is_grad_enabled() and damping.requires_grad  # exp's backward needs its result
    weights = damping * scores[:, :, None] if tracked else damping.mul_(scores[:, :, None])
    weights = weights.view(batch * chunks, heads, chunk, chunk)
    by_head = inflow.reshape(batch * chunks, chunk, heads, width).transpose(1, 2)
    within = weights @ by_head  # (batch·chunks, heads, chunk, width)

    # What the chunk adds to the state by its end: (states × chunk) · (chunk × heads of the group · width).
    to_end = (cumulative[..., -1:] - cumulative).exp().transpose(1, 2)  # (batch·chunks, chunk, heads)
    damped = inflow * to_end.reshape(batch * chunks, chunk, groups, heads_per_group, 1)
    damped = damped.reshape(batch * chunks, chunk, groups, heads_per_group * width).transpose(1, 2)
    added = (b.transpose(-1, -2) @ damped).view(batch, chunks, groups, states, heads_per_group, width)

    # Between chunks: the plain recurrence, one step per chunk.
    decay_of_chunk = cumulative[..., -1].exp().view(batch, chunks, groups, 1, heads_per_group, 1)
    state = x.new_zeros(batch, groups, states, heads_per_group, width)
    entering = []
    for index in range(chunks):
        entering.append(state)
        state = state * decay_of_chunk[:, index] + added[:, index]
    before = torch.stack(entering, 1).view(batch * chunks, groups, states, heads_per_group * width)

    # What the state at the chunk's start still says to token t.
    carried = (c @ before).view(batch * chunks, groups, chunk, heads_per_group, width)
    from_start = cumulative.exp().view(batch * chunks, groups, heads_per_group, chunk).transpose(2, 3)
    carried = (carried * from_start[..., None]).transpose(1, 2).reshape(batch, chunks * chunk, heads, width)

    y = within.transpose(1, 2).reshape(batch, chunks * chunk, heads, width) + carried
    return y[:, :time]
