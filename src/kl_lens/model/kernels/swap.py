"""Replaces the kernels of a model's state-space layers by ours, temporarily.

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
from torch import Tensor
from torch.nn import functional

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.errors import UnsupportedError
from kl_lens.model.kernels.checking import replacing
from kl_lens.model.kernels.chunked_scan import chunked_scan, time_steps, tracked_scan
from kl_lens.model.kernels.head_scan import head_scan
from kl_lens.model.kernels.selective_scan import causal_convolution, selective_scan
from kl_lens.model.patching import has_own_forward, patched, with_globals
from kl_lens.model.states import StateFormat, running_format
from kl_lens.run.records import KEYS, STATE, VALUES

Function = Callable[..., Any]


def _is_inference(*tensors: Tensor | None) -> bool:
    """Our compiled kernels have no gradients; under autograd scans are made of torch's operations."""
    return not (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
    )


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    # transformers passes (batch, channels, time) and (batch, states, time).
    x, step, b, c = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)
    storage = running_format(STATE, A.shape[0], 1, A.shape[1])
    if storage is not None:
        step = time_steps(step, delta_bias, delta_softplus)
        y = _rounded_scan(
            x[..., None], step, A, b[:, :, None], c[:, :, None], storage, D
        ).squeeze(3)
        y = y if gate is None else y * functional.silu(gate.float())
        return y.transpose(1, 2)
    kernel: Function
    if return_last_state:  # for a cache, which nothing here uses
        return NotImplemented
    if not _is_inference(hidden_states, dt, A, B, C, D, z, delta_bias):
        kernel = tracked_scan
    elif x.device.type == "cpu":
        kernel = selective_scan
    elif runs_triton(x.device):
        from kl_lens.model.kernels import triton_scan

        if not triton_scan.fits_selective(A.shape[-1]):
            return NotImplemented
        kernel = triton_scan.selective_scan_gpu
    else:
        return NotImplemented
    y = kernel(
        x,
        step,
        A,
        b,
        c,
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        skip=D,
        gate=gate,
    )
    return y.transpose(1, 2)


def _rounded_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    storage: StateFormat,
    skip: Tensor | None,
) -> Tensor:
    """Outputs with a state that is rounded after every token."""
    if x.device.type == "cpu":
        from kl_lens.model.kernels.rounded_scan import rounded_scan

        return rounded_scan(x, step, a, b, c, storage, skip=skip)[0]
    if not runs_triton(x.device):
        raise UnsupportedError(
            f"states are not measured on {x.device}: measure on a CPU, with --device cpu"
        )
    from kl_lens.model.kernels.triton_rounded_scan import rounded_scan_gpu

    return rounded_scan_gpu(x, step, a, b, c, storage, skip=skip)


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    if initial_states is not None or return_final_states:
        return NotImplemented
    inference = _is_inference(hidden_states, dt, A, B, C, D, dt_bias)
    storage = running_format(STATE, *hidden_states.shape[2:], B.shape[3])
    if inference and storage is None and runs_triton(hidden_states.device):
        from triton.runtime.errors import OutOfResources

        from kl_lens.model.kernels import triton_scan

        if triton_scan.fits_chunks(hidden_states.shape[3], B.shape[3]):
            with suppress(OutOfResources):  # a card with little shared memory
                return triton_scan.head_scan_gpu(
                    hidden_states,
                    dt,
                    A,
                    B,
                    C,
                    dt_bias=dt_bias,
                    dt_softplus=dt_softplus,
                    dt_limit=dt_limit,
                    skip=D,
                )
    x = hidden_states.float()
    step = time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    if storage is not None:
        return _rounded_scan(x, step, A, B, C, storage, D)
    if inference and x.device.type == "cpu":
        return head_scan(x, step, A, B, C, skip=D)
    y = chunked_scan(x, step, A.float(), B.float(), C.float())
    y = y if D is None else y + x * D[..., None]
    return y.contiguous()  # callers use .view() on it


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Any:
    on_gpu = runs_triton(hidden_states.device)
    has_kernel = on_gpu or hidden_states.device.type == "cpu"
    is_plain = activation in (None, "silu", "swish") and seq_idx is None
    if not (has_kernel and is_plain and _is_inference(hidden_states, weight, bias)):
        return NotImplemented
    kernel: Function = causal_convolution
    if on_gpu:
        from kl_lens.model.kernels.triton_scan import causal_convolution_gpu as kernel
    y = kernel(
        hidden_states.transpose(1, 2), weight, bias, with_silu=activation is not None
    )
    return y.transpose(1, 2).to(hidden_states.dtype)


def _as_stored(tensor: Tensor, kind: str) -> Tensor:
    """Keys or values (batch, heads, time, width) as they come back from the running block's cache."""
    storage = running_format(kind, tensor.shape[1], tensor.shape[3])
    return tensor if storage is None else storage.rounded(tensor)


def _replaced(kernel: str, function: Function) -> Callable[[Function], Function]:
    """Replaces the library's function by ours, which may answer `NotImplemented`: then the library's is called."""

    def replaced(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        return replacing(kernel, original, call)

    return replaced


class _AttentionFunctions:
    """The library's table of attention functions, which get keys and values as they come back from a cache."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def get_interface(self, implementation: str, default: Function) -> Function:
        attend: Function = self._original.get_interface(implementation, default)
        if implementation != "sdpa":
            return attend

        def from_cache(
            module: torch.nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            key = _as_stored(key, KEYS)
            value = _as_stored(value, VALUES)
            return attend(module, query, key, value, *args, **kwargs)

        return from_cache

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
    replacements = {name: REPLACEMENTS[name](plain.__globals__[name]) for name in called}
    return with_globals(plain, replacements)


# Classes with their settings (a norm may have groups) that were tried → whether they are what `_norm_on_gpu` computes.
_NORMS: dict[tuple[Any, ...], bool] = {}


def _epsilon(module: torch.nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """weight · x/√(mean x² + ε), with a gate's SiLU as factor in front where there is a gate: seen on random inputs."""
    epsilon = _epsilon(module)
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    if (
        parameters
        or weight is None
        or weight.dim() != 1
        or not isinstance(epsilon, float)
    ):
        return False
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, int | float)}
    kind = (type(module), weight.numel(), *sorted(numbers.items()))
    if kind not in _NORMS:
        _NORMS[kind] = _computes_rms_norm(module, weight, epsilon)
    return _NORMS[kind]


def _computes_rms_norm(module: torch.nn.Module, weight: Tensor, epsilon: float) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    if names not in (["hidden_states"], ["hidden_states", "gate"], ["x"]):
        return False
    inputs = torch.randn(len(names), 3, len(weight), device=weight.device)
    try:
        result = module(*inputs)
    except Exception:  # foreign code may raise anything; then it is not one
        return False
    x = inputs[0] if len(names) == 1 else inputs[0] * functional.silu(inputs[1])
    expected = weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    is_tensor = isinstance(result, Tensor)
    return is_tensor and torch.allclose(result, expected, rtol=1e-5, atol=1e-6)


def _norm_on_gpu(module: torch.nn.Module) -> Function | None:
    """A one-pass forward of a norm; None if the module is not one or there is no gain."""
    weight: Any = getattr(module, "weight", None)
    on_gpu = isinstance(weight, Tensor) and runs_triton(weight.device)
    if not (on_gpu and weight.dtype == torch.float32 and _is_rms_norm(module)):
        return None
    from kl_lens.model.kernels.triton_scan import rms_norm_gpu

    original = module.forward

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if hidden_states.dtype != torch.float32 or not _is_inference(hidden_states, gate):
            inputs = (hidden_states,) if gate is None else (hidden_states, gate)
            return original(*inputs)
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
    layers = replaceable(model) if among is None else among
    free = [module for module in layers if has_own_forward(module)]
    mixers = [
        (module, types.MethodType(forward, module))
        for module in free
        if (forward := _forward_with_our_kernels(type(module).forward)) is not None
    ]
    norms = [(m, forward) for m in free if (forward := _norm_on_gpu(m)) is not None]
    with patched(mixers), patched(norms):
        yield len(mixers)
