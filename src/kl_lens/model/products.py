"""Finds the axis along which a model multiplies its parameters, by watching one forward.

Formats quantize along the last axis, which must be the one that a product sums over. For a `Linear` that is known. A
parameter that a module multiplies itself (`self.x_proj_weight @ x`) may be either way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Function name → positions of its left and right matrix among the arguments.
_PRODUCTS = {
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), (0, 1)),
    "__rmatmul__": (1, 0),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}


class _Watcher(TorchFunctionMode):
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.seen: dict[str, set[bool]] = {name: set() for name in parameters}
        self._parameters = parameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "linear":
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            self._note(weight, -1)
        elif name in _PRODUCTS and len(args) > max(_PRODUCTS[name]):
            left, right = _PRODUCTS[name]
            self._note(args[left], -1)
            self._note(args[right], -2)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: Any, axis: int) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            return
        place = tensor.data_ptr()
        for name, parameter in self._parameters.items():
            # Compare present addresses: weights on disk are somewhere else each time, or have no size.
            if (
                0
                <= place - parameter.data_ptr()
                < min(parameter.nbytes, parameter.untyped_storage().nbytes())
            ):
                whole = tensor.shape[axis] == parameter.shape[-1]
                self.seen[name].add(whole and tensor.stride(axis) == parameter.stride(-1))


def summed_along_last_axis(
    forward: Callable[[], Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, bool | None]:
    """For each parameter: do all products of it, or of its views, sum over its last axis? None: no product."""
    if not parameters:
        return {}
    with _Watcher(parameters) as watcher:
        forward()
    return {name: all(seen) if seen else None for name, seen in watcher.seen.items()}
