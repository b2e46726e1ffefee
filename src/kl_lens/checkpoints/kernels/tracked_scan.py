"""The selective scan of Mamba-1 for autograd, on any device.

torch would keep a copy of the whole text's gradient for every step that reads one token of it. Here the recurrence is
one operation with its own backward pass: two loops of one small operation per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class _Recurrence(torch.autograd.Function):
    """h[t] = decay[t] · h[t-1] + inflow[t] over the first axis; h[-1] is zero."""

    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, inflow: torch.Tensor) -> torch.Tensor:
        states = inflow.clone()
        for before, now, factor in zip(states, states[1:], decay[1:], strict=False):
            now.addcmul_(factor, before)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        flowing = gradients[0].clone()
        for t in range(len(flowing) - 1, 0, -1):
            flowing[t - 1].addcmul_(decay[t], flowing[t])
        of_decay = torch.zeros_like(flowing)
        torch.mul(flowing[1:], states[:-1], out=of_decay[1:])
        return of_decay, flowing


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results of `selective_scan`, with gradients. What is between is computed again for them."""
    step = dt if dt_bias is None else dt + dt_bias
    step = functional.softplus(step) if dt_softplus else step
    y, state = checkpoint(_outputs, x, step, a, b, c, use_reentrant=False)
    y = y if skip is None else y + skip * x
    return y if gate is None else y * functional.silu(gate), state


def _outputs(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, step, b, c = (tensor.float().transpose(0, 1) for tensor in (x, step, b, c))  # (time, batch, …)
    decay = torch.exp(step[..., None] * a)  # (time, batch, channels, states)
    states = _Recurrence.apply(decay, (step * x)[..., None] * b[:, :, None])
    return torch.einsum("tbcs,tbs->btc", states, c), states[-1]
