"""Gives the state-space and attention layers of one model our kernels, and takes them away again.

transformers calls its scans, and its table of attention functions, by module-level names from each mixer's `forward`.
Replacing what those names stand for would change the user's library for everybody; instead, for the time of a `with`
block, each mixer *instance* gets a copy of its own `forward` whose globals name our functions. Layers that look
different (remote code, other libraries) keep what they have: slower, never wrong.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from kl_lens.checkpoints.kernels import triton_scan
from kl_lens.checkpoints.kernels.attention import causal_attention, is_faster
from kl_lens.checkpoints.kernels.chunked_scan import chunked_scan
from kl_lens.checkpoints.kernels.convolution import causal_convolution
from kl_lens.checkpoints.kernels.head_scan import head_scan
from kl_lens.checkpoints.kernels.selective_scan import selective_scan
from kl_lens.checkpoints.kernels.triton_scan import selective_scan_gpu
from kl_lens.checkpoints.patching import has_own_forward, patched, with_globals

Function = Callable[..., Any]


def _is_inference(tensor: torch.Tensor) -> bool:
    """Our kernels have no gradients; under autograd the library's own functions run."""
    return not (torch.is_grad_enabled() and tensor.requires_grad)


def _scan_for(tensor: torch.Tensor, states: int) -> Function | None:
    """The selective scan for this device; None where we have none."""
    if not _is_inference(tensor):
        return None
    if tensor.device.type == "cpu":
        return selective_scan
    return selective_scan_gpu if triton_scan.is_available(tensor.device, states) else None


def _mamba_selective_scan(original: Function) -> Function:
    @functools.wraps(original)
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        kernel = _scan_for(hidden_states, A.shape[-1])
        if kernel is None:
            return original(
                hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **kwargs
            )
        # transformers passes (batch, channels, time) and (batch, states, time).
        y, state = kernel(
            hidden_states.transpose(1, 2),
            dt.transpose(1, 2),
            A,
            B.transpose(1, 2),
            C.transpose(1, 2),
            dt_bias=delta_bias,
            dt_softplus=delta_softplus,
            skip=D,
            gate=None if z is None else z.transpose(1, 2),
        )
        y = y.transpose(1, 2)
        return (y, state) if return_last_state else y

    return scan


def _mamba2_chunk_scan(original: Function) -> Function:
    @functools.wraps(original)
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not _is_inference(hidden_states):
            return original(
                hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias,
                initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit,
                return_final_states=return_final_states, **kwargs,
            )  # fmt: skip
        x, step = hidden_states.float(), dt.float()
        if dt_bias is not None:
            step = step + dt_bias.float()
        if dt_softplus:
            step = functional.softplus(step)
        step = step.clamp(*dt_limit)
        if x.device.type == "cpu":
            y, state = head_scan(x, step, A, B, C, initial_states, skip=D)
        else:
            y, state = chunked_scan(x, step, A.float(), B.float(), C.float(), initial_states)
            if D is not None:
                y = y + x * D[..., None]
        y = y.contiguous()  # callers use .view() on it
        return (y, state) if return_final_states else y

    return scan


def _causal_conv1d_fn(original: Function) -> Function:
    @functools.wraps(original)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        fits = hidden_states.device.type == "cpu" and _is_inference(hidden_states)
        if not fits or activation not in (None, "silu", "swish"):
            return original(hidden_states, weight, bias=bias, activation=activation, **kwargs)
        y = causal_convolution(hidden_states.transpose(1, 2), weight, bias, with_silu=activation is not None)
        return y.transpose(1, 2).to(hidden_states.dtype)

    return convolve


def _causal_or(original: Function) -> Function:
    """Our causal attention where no mask or bias is given and it is known to be faster; the library's elsewhere."""

    @functools.wraps(original)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        unusual = dropout or any(
            kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap")
        )
        if (
            causal
            and attention_mask is None
            and not unusual
            and _is_inference(query)
            and is_faster(query, key)
        ):
            return causal_attention(query, key, value, scaling), None
        return original(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip

    return attend


class _AttentionFunctions:
    """The library's table of attention functions with ours in the place of torch's scaled dot product."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def get_interface(self, implementation: str, default: Function) -> Function:
        chosen: Function = self._original.get_interface(implementation, default)
        return _causal_or(chosen) if implementation == "sdpa" else chosen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __getitem__(self, implementation: str) -> Function:
        chosen: Function = self._original[implementation]
        return _causal_or(chosen) if implementation == "sdpa" else chosen


# The library's name → what we put in its place. A new kernel is one line here.
REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "causal_conv1d_fn": _causal_conv1d_fn,
    "ALL_ATTENTION_FUNCTIONS": _AttentionFunctions,
}


@functools.cache
def _forward_with_our_kernels(forward: Function) -> Function | None:
    """A copy of a mixer's `forward` that calls our kernels; None when it calls none that we replace."""
    plain = inspect.unwrap(forward)
    if not isinstance(plain, types.FunctionType):
        return None
    called = set(plain.__code__.co_names) & set(REPLACEMENTS) & set(plain.__globals__)
    if not called:
        return None
    ours = {name: REPLACEMENTS[name](plain.__globals__[name]) for name in called}
    return with_globals(plain, ours)


@contextmanager
def fast_kernels(model: torch.nn.Module) -> Iterator[int]:
    """Within the block, the state-space and attention layers of `model` run our kernels. Yields how many layers do."""
    # Layers under somebody else's forward keep it, and so do those that are ours already.
    free = [(m, _forward_with_our_kernels(type(m).forward)) for m in model.modules() if has_own_forward(m)]
    ours = [(module, types.MethodType(forward, module)) for module, forward in free if forward is not None]
    with patched(ours):
        yield len(ours)
