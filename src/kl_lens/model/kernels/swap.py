"""Replaces the kernels of a model's state-space and attention layers by ours, temporarily.

transformers calls its scans and its table of attention functions by module-level names from each mixer's `forward`.
Changing those names would change the library for everyone. Instead, within a `with` block, each mixer *instance* gets a
copy of its own `forward` whose globals name our functions. Layers that look different (remote code, other libraries)
keep their own: slower, never wrong. `checking.py` compares ours with the library's.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import functional

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.errors import UnsupportedError
from kl_lens.model.kernels.attention import causal_attention, is_faster
from kl_lens.model.kernels.checking import replacing
from kl_lens.model.kernels.chunked_scan import chunked_scan, tracked_scan
from kl_lens.model.kernels.head_scan import head_scan
from kl_lens.model.kernels.selective_scan import causal_convolution, selective_scan
from kl_lens.model.patching import has_own_forward, patched, with_globals
from kl_lens.model.states import KEYS, STATE, VALUES, StateFormat, kept

T = torch.Tensor
Function = Callable[..., Any]


def _is_inference(*tensors: T | None) -> bool:
    """Our compiled kernels have no gradients; under autograd scans are made of torch's operations."""
    return not (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
    )


def _selective_scan(
    original: Function,
    hidden_states: T,
    dt: T,
    A: T,
    B: T,
    C: T,
    D: T | None = None,
    z: T | None = None,
    delta_bias: T | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    if (how := kept(STATE, A.shape[0], 1, A.shape[1])) is not None:
        step = (
            dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
        )
        step = (functional.softplus(step) if delta_softplus else step).transpose(1, 2)
        x, B, C = (
            tensor.transpose(1, 2).unsqueeze(axis)
            for tensor, axis in ((hidden_states, 3), (B, 2), (C, 2))
        )
        y = _rounded_scan(x, step, A, B, C, how, D).squeeze(3).transpose(1, 2)
        return y if z is None else y * functional.silu(z.float())
    kernel: Function | None = None
    if return_last_state:
        pass  # for a cache, which nothing here uses
    elif not _is_inference(hidden_states, dt, A, B, C, D, z, delta_bias):
        kernel = tracked_scan
    elif hidden_states.device.type == "cpu":
        kernel = selective_scan
    elif runs_triton(hidden_states.device):
        from kl_lens.model.kernels import triton_scan

        kernel = (
            triton_scan.selective_scan_gpu
            if triton_scan.fits_selective(A.shape[-1])
            else None
        )
    if kernel is None:
        return original(
            hidden_states,
            dt,
            A,
            B,
            C,
            D,
            z,
            delta_bias,
            delta_softplus,
            return_last_state,
            **kwargs,
        )
    # transformers passes (batch, channels, time) and (batch, states, time).
    x, dt, B, C = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)
    y = kernel(
        x, dt, A, B, C, dt_bias=delta_bias, dt_softplus=delta_softplus, skip=D, gate=gate
    )
    return y.transpose(1, 2)


def _rounded_scan(x: T, step: T, a: T, b: T, c: T, how: StateFormat, skip: T | None) -> T:
    """Outputs with a state that is rounded after every token."""
    if x.device.type == "cpu":
        from kl_lens.model.kernels.rounded_scan import rounded_scan

        return rounded_scan(x, step, a, b, c, how, skip=skip)[0]
    if not runs_triton(x.device):
        raise UnsupportedError(
            f"states are not measured on {x.device}: measure on a CPU, with --device cpu"
        )
    from kl_lens.model.kernels.triton_rounded_scan import rounded_scan_gpu

    return rounded_scan_gpu(x, step, a, b, c, how, skip=skip)


def _chunk_scan(
    original: Function,
    hidden_states: T,
    dt: T,
    A: T,
    B: T,
    C: T,
    chunk_size: int,
    D: T | None = None,
    *,
    dt_bias: T | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Any:
    options: dict[str, Any] = {
        "dt_bias": dt_bias,
        "dt_softplus": dt_softplus,
        "dt_limit": dt_limit,
    }
    if kwargs.get("initial_states") is not None or kwargs.get("return_final_states"):
        return original(hidden_states, dt, A, B, C, chunk_size, D=D, **options, **kwargs)
    inference = _is_inference(hidden_states, dt, A, B, C, D, dt_bias)
    how = kept(STATE, *hidden_states.shape[2:], B.shape[3])
    if inference and how is None and runs_triton(hidden_states.device):
        from triton.runtime.errors import OutOfResources

        from kl_lens.model.kernels import triton_scan

        if triton_scan.fits_chunks(hidden_states.shape[3], B.shape[3]):
            with suppress(OutOfResources):  # a card with little shared memory
                return triton_scan.head_scan_gpu(
                    hidden_states, dt, A, B, C, skip=D, **options
                )
    x = hidden_states.float()
    step = dt.float()
    if dt_bias is not None:
        step = step + dt_bias.float()
    if dt_softplus:
        step = functional.softplus(step)
    step = step.clamp(*dt_limit)
    if how is not None:
        return _rounded_scan(x, step, A, B, C, how, D)
    if inference and x.device.type == "cpu":
        return head_scan(x, step, A, B, C, skip=D)
    y = chunked_scan(x, step, A.float(), B.float(), C.float())
    y = y if D is None else y + x * D[..., None]
    return y.contiguous()  # callers use .view() on it


def _convolve(
    original: Function,
    hidden_states: T,
    weight: T,
    bias: T | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    on_gpu = runs_triton(hidden_states.device)
    fits = (on_gpu or hidden_states.device.type == "cpu") and _is_inference(
        hidden_states, weight, bias
    )
    if (
        not fits
        or activation not in (None, "silu", "swish")
        or kwargs.get("seq_idx") is not None
    ):
        return original(hidden_states, weight, bias=bias, activation=activation, **kwargs)
    kernel: Function = causal_convolution
    if on_gpu:
        from kl_lens.model.kernels.triton_scan import causal_convolution_gpu as kernel
    y = kernel(
        hidden_states.transpose(1, 2), weight, bias, with_silu=activation is not None
    )
    return y.transpose(1, 2).to(hidden_states.dtype)


def _attend(
    original: Function,
    module: torch.nn.Module,
    query: T,
    key: T,
    value: T,
    attention_mask: T | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Our causal attention if there is no mask or bias and it is known to be faster; else the library's."""
    if (how := kept(KEYS, key.shape[1], key.shape[3])) is not None:
        key = how.rounded(key)
    if (how := kept(VALUES, value.shape[1], value.shape[3])) is not None:
        value = how.rounded(value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    named = (kwargs.get(name) for name in ("position_bias", "cache", "softcap"))
    usual = (
        causal
        and attention_mask is None
        and not dropout
        and all(value is None for value in named)
    )
    if usual and _is_inference(query, key, value) and is_faster(query, key):
        return causal_attention(query, key, value, scaling), None
    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    return original(module, query, key, value, attention_mask, **options)


def _replaced(kernel: str, ours: Function) -> Function:
    return lambda original: replacing(kernel, original, functools.partial(ours, original))


class _AttentionFunctions:
    """The library's table of attention functions with ours instead of torch's scaled dot product."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def get_interface(self, implementation: str, default: Function) -> Function:
        chosen: Function = self._original.get_interface(implementation, default)
        return (
            _replaced("attention", _attend)(chosen)
            if implementation == "sdpa"
            else chosen
        )

    def __getitem__(self, implementation: str) -> Function:
        return self.get_interface(implementation, self._original[implementation])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


# The library's name → our replacement. A new kernel is one line here.
REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "mamba_selective_scan": _replaced("Mamba-1 scan", _selective_scan),
    "mamba2_chunk_scan": _replaced("Mamba-2 scan", _chunk_scan),
    "causal_conv1d_fn": _replaced("convolution", _convolve),
    "ALL_ATTENTION_FUNCTIONS": _AttentionFunctions,
}


@functools.cache
def _forward_with_our_kernels(forward: Function) -> Function | None:
    """A copy of a mixer's `forward` that calls our kernels; None if it calls none that we replace."""
    plain = inspect.unwrap(forward)
    if not isinstance(plain, types.FunctionType):
        return None
    called = set(plain.__code__.co_names) & set(REPLACEMENTS) & set(plain.__globals__)
    if not called:
        return None
    ours = {name: REPLACEMENTS[name](plain.__globals__[name]) for name in called}
    return with_globals(plain, ours)


# Classes with their settings (a norm may have groups) that were tried → whether they are what `_norm_on_gpu` computes.
_NORMS: dict[tuple[Any, ...], bool] = {}


def _epsilon(module: torch.nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """weight · x/√(mean x² + ε), with a gate's SiLU as factor in front where there is a gate: seen on random inputs."""
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    }
    parameters = dict(module.named_parameters())
    epsilon = _epsilon(module)
    if (
        list(parameters) != ["weight"]
        or parameters["weight"].dim() != 1
        or not isinstance(epsilon, float)
    ):
        return False
    kind = (type(module), parameters["weight"].numel(), *sorted(settings.items()))
    if kind not in _NORMS:
        names = list(inspect.signature(module.forward).parameters)
        weight = parameters["weight"]
        given = torch.randn(len(names), 3, len(weight), device=weight.device)
        try:
            found = (
                module(*given)
                if names in (["hidden_states"], ["hidden_states", "gate"], ["x"])
                else None
            )
        except Exception:  # foreign code may raise anything; then it is not one
            found = None
        x = given[0] if len(names) == 1 else given[0] * functional.silu(given[1])
        expected = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        _NORMS[kind] = isinstance(found, torch.Tensor) and torch.allclose(
            found, expected, rtol=1e-5, atol=1e-6
        )
    return _NORMS[kind]


def _norm_on_gpu(module: torch.nn.Module) -> Function | None:
    """A one-pass forward of a norm; None if the module is not one or there is no gain."""
    weight: Any = getattr(module, "weight", None)
    on_gpu = isinstance(weight, torch.Tensor) and runs_triton(weight.device)
    if not (on_gpu and weight.dtype == torch.float32 and _is_rms_norm(module)):
        return None
    from kl_lens.model.kernels.triton_scan import rms_norm_gpu

    original = module.forward

    def forward(
        hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        if hidden_states.dtype != torch.float32 or not _is_inference(hidden_states, gate):
            return (
                original(hidden_states) if gate is None else original(hidden_states, gate)
            )
        return rms_norm_gpu(hidden_states, module.weight, _epsilon(module), gate)  # type: ignore[arg-type]

    return replacing("norm", original, forward)


def replaceable(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that may get our kernels; found once per model."""
    return [
        module
        for module in model.modules()
        if _forward_with_our_kernels(type(module).forward) is not None
        or _epsilon(module) is not None
    ]


@contextmanager
def fast_kernels(
    model: torch.nn.Module, among: Iterable[torch.nn.Module] | None = None
) -> Iterator[int]:
    """Within the block, the state-space and attention layers of `model` run our kernels. Yields their number. `among`:
    the result of `replaceable`."""
    # Layers whose forward was already replaced keep it.
    free = [
        m for m in (replaceable(model) if among is None else among) if has_own_forward(m)
    ]
    ours = [
        (module, types.MethodType(forward, module))
        for module in free
        if (forward := _forward_with_our_kernels(type(module).forward)) is not None
    ]
    norms = [(m, forward) for m in free if (forward := _norm_on_gpu(m)) is not None]
    with patched(ours), patched(norms):
        yield len(ours)
