"""The selective scan of Mamba-1 for autograd, on any device.

torch would keep a copy of the whole text's gradient for every step that reads one token of it. Here the recurrence is
one operation, whose backward pass is the same recurrence from the end. It runs in chunks side by side, and what leaves
a chunk is then added to the next: 45 small operations for 512 tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def _states(decay: torch.Tensor, inflow: torch.Tensor) -> torch.Tensor:
    """h[t] = decay[t] · h[t-1] + inflow[t] over the first axis; h[-1] is zero."""
    time = len(inflow)
    length = math.isqrt(time - 1) + 1
    padding = [0, 0] * (inflow.dim() - 1) + [0, -time % length]
    # (chunks, length, …)
    factors, states = (functional.pad(t, padding).unflatten(0, (-1, length)) for t in (decay, inflow.clone()))
    for t in range(1, length):
        states[:, t].addcmul_(factors[:, t], states[:, t - 1])
    reach = factors.cumprod(1)  # of what enters a chunk, at every step of it
    for before, now, factor in zip(states, states[1:], reach[1:], strict=False):
        now.addcmul_(factor, before[-1])
    return states.flatten(0, 1)[:time]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, inflow: torch.Tensor) -> torch.Tensor:
        states = _states(decay, inflow)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        later = functional.pad(decay[1:], [0, 0] * (decay.dim() - 1) + [0, 1])
        flowing = _states(later.flip(0), gradients[0].flip(0)).flip(0)
        before = functional.pad(states[:-1], [0, 0] * (decay.dim() - 1) + [1, 0])
        return flowing * before, flowing


def tracked_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    skip: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result of `selective_scan`, with gradients. What is between is computed again for them."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias
    step = functional.softplus(step) if dt_softplus else step
    y = checkpoint(_outputs, x, step, a, b, c, use_reentrant=False)
    y = y if skip is None else y + skip * x
    return y if gate is None else y * functional.silu(gate.float())


def _outputs(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    x, step, b, c = (tensor.float().transpose(0, 1) for tensor in (x, step, b, c))  # (time, batch, …)
    decay = torch.exp(step[..., None] * a)  # (time, batch, channels, states)
    states = _Recurrence.apply(decay, (step * x)[..., None] * b[:, :, None])
    return torch.einsum("tbcs,tbs->btc", states, c)
