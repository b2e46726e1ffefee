"""Is a kernel right? Its results are compared with those of the library's own function for the same inputs.

The library's function runs in double precision, so the difference is the rounding of our kernel alone, and a mistake is
not hidden by what other layers do. Errors are relative, by the norms of whole results. Sound kernels in float32 are off
by 6e-8 to 5e-7 on CPU and by up to 2e-6 on a GPU. A state that grows by a factor of 1.0001 per step is off by 3e-5 or
more over 136 tokens. `ROUNDING` lies between. A result that is stored in half precision may also be off by half a unit
of that; there, 1.0001 cannot be seen. Gradients cancel more: sound ones are off by up to 5e-5. Where the library itself
rounds more, our kernel may be off by a few times as much.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Function = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]

ROUNDING = 5e-6
ROUNDING_OF_GRADIENTS = 2e-4
TRACKED = " (with autograd)"
GRADIENTS = " (gradients)"  # of kernels' names
_AS_THE_LIBRARY = 4.0  # times the library's own error


class InDouble(TorchFunctionMode):
    """Within the block, conversions to float32 are conversions to float64: the library converts by name."""

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args)
        kwargs = {
            k: torch.float64 if v is torch.float32 else v
            for k, v in (kwargs or {}).items()
        }
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


@dataclass(frozen=True)
class Comparison:
    """The largest error of a kernel, and the limit for it."""

    kernel: str
    error: float  # relative to the norm of the exact result
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.kernel}: off by {self.error:.1e}, rounding allows {self.limit:.1e}"


class Watch:
    """Compares the calls of our kernels; `gradients`: with gradients, for which other kernels may be used."""

    def __init__(self, *, gradients: bool = False) -> None:
        self.comparisons: dict[str, Comparison] = {}  # the worst of each kernel
        self._gradients = gradients
        self._calls: Counter[tuple[Any, ...]] = Counter()  # by kernel and shapes

    @contextmanager
    def watching(self) -> Iterator[None]:
        token = _WATCH.set(self)
        try:
            yield
        finally:
            _WATCH.reset(token)

    def compare(
        self,
        kernel: str,
        replacement: Function,
        original: Function,
        arguments: Arguments,
        rounding: float = 0.0,
    ) -> Any:
        """The result of `ours`. `own`: the rounding that this kernel is allowed, if more than float32's."""
        shapes = [x.shape for x in arguments[0] if isinstance(x, Tensor)]
        layer = self._calls[kernel, *shapes]
        self._calls[kernel, *shapes] += 1
        # Layers 0, 1, 2, 4, 8, …; the first two with gradients: the library's own scans are slow.
        if layer & (layer - 1) or (self._gradients and layer > 1):
            return replacement(*arguments[0], **arguments[1])
        plain = _without_packages(original)
        with (
            torch.inference_mode(False),
            torch.enable_grad() if self._gradients else torch.no_grad(),
        ):
            try:
                with InDouble():
                    wide = pytree.tree_map(
                        lambda x: x.double() if _is_real(x) else x, arguments
                    )
                    _, exact = self._results(plain, wide)
            except Exception:  # code of a checkpoint may run on a GPU or in float32 only: nothing to compare with
                exact = {}
            result, results = self._results(replacement, arguments)
            for part, right in exact.items():
                base = (
                    ROUNDING_OF_GRADIENTS
                    if part == GRADIENTS
                    else max(ROUNDING, rounding)
                )
                error = _largest_error(results[part], right)
                limit = base + _stored(results[part])
                if not error <= limit:
                    _, library = self._results(plain, arguments)
                    limit = max(
                        limit, _AS_THE_LIBRARY * _largest_error(library[part], right)
                    )
                worst = self.comparisons.get(kernel + part)
                if worst is None or not error / limit <= worst.error / worst.limit:
                    self.comparisons[kernel + part] = Comparison(
                        kernel + part, error, limit
                    )
        return result

    def _results(
        self, function: Function, arguments: Arguments
    ) -> tuple[Any, dict[str, list[Tensor]]]:
        """What a function returns, the tensors in it, and the gradients of its inputs where they are asked for."""
        if self._gradients:
            arguments = pytree.tree_map(
                lambda x: x.clone().requires_grad_() if _is_real(x) else x, arguments
            )
        args, kwargs = arguments
        result = function(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if not self._gradients:
            return result, {"": outputs}
        inputs = [x for x in pytree.tree_leaves(arguments) if _is_real(x)]
        # Some function of the outputs that treats no two of them alike.
        ramps = [
            torch.linspace(-1, 1, x.numel(), device=x.device).to(x.dtype).view_as(x)
            for x in outputs
        ]
        gradients = torch.autograd.grad(
            outputs, inputs, ramps, allow_unused=True, materialize_grads=True
        )
        parts = {TRACKED: [x.detach() for x in outputs], GRADIENTS: list(gradients)}
        return pytree.tree_map(
            lambda x: x.detach() if isinstance(x, Tensor) else x, result
        ), parts


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def replacing(
    kernel: str, original: Function, replacement: Function, rounding: float = 0.0
) -> Function:
    """`ours` in place of the library's `original`, compared with it where somebody watches. Ours compute in float32. In
    float64 the library's function is used, in double precision throughout."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(x, Tensor) and x.dtype == torch.float64
            for x in (*args, *kwargs.values())
        ):
            with InDouble():
                return _without_packages(original)(*args, **kwargs)
        watch = _WATCH.get()
        if watch is None:
            return replacement(*args, **kwargs)
        return watch.compare(kernel, replacement, original, (args, kwargs), rounding)

    return call


def _without_packages(original: Function) -> Function:
    """The library's function in plain torch: packages with CUDA kernels, which may stand in for it, know no double."""
    return original if inspect.ismethod(original) else inspect.unwrap(original)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _stored(results: Sequence[Tensor]) -> float:
    """What rounding to the results' own type may add."""
    return (
        max(
            (torch.finfo(x.dtype).eps for x in results if x.is_floating_point()),
            default=0.0,
        )
        / 2
    )


def _largest_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative to the norm of each exact result; nothing is said about results that are NaN or infinite."""
    errors = [0.0]
    for result, right in zip(results, exact, strict=False):
        size = float(right.double().norm())
        if size == size and size != torch.inf:
            errors.append(float((result.double() - right).norm()) / (size or 1.0))
    return max(errors, key=lambda error: torch.inf if error != error else error)
