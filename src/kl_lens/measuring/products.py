"""Faster matrix products, on tensor cores of a GPU.

`tf32x3` is nearly as accurate as float32 and several times as fast. `tf32` is faster still, and adds noise to every
number; a run reports how much. The choice is part of the run's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.errors import RunError
from kl_lens.model import Chain, LoadedModel
from kl_lens.model.kernels.checking import ROUNDING, Comparison, replacing
from kl_lens.model.patching import has_own_forward, patched

FLOAT32, TF32X3, TF32 = PRECISIONS = ("float32", "tf32x3", "tf32")
PRODUCTS = "matrix products"
_SOUND: WeakKeyDictionary[Chain, dict[str, bool]] = (
    WeakKeyDictionary()
)  # precisions that were compared


def _rounding(precision: str, depth: int) -> float:
    """Largest relative error of a sound product. Tensor cores cut off their sums instead of rounding them."""
    return 1e-3 if precision == TF32 else ROUNDING + 1e-8 * depth


def has_tensor_cores(model: LoadedModel) -> bool:
    first = next(model.model.parameters())
    return (
        runs_triton(first.device)
        and first.dtype == torch.float32
        and torch.cuda.get_device_capability(first.device)
        >= (8, 0)  # the kernels' tiles need Ampere
    )


def precision_for(wanted: str | None, model: LoadedModel) -> str:
    """The wanted precision, or the fastest with float32's accuracy. Raises if the hardware does not have it."""
    possible = has_tensor_cores(model)
    if wanted is None:
        return _checked(TF32X3, model) if possible else FLOAT32
    if wanted != FLOAT32 and not possible:
        first = next(model.model.parameters())
        raise RunError(
            f"--precision {wanted}: needs an Ampere GPU or later, Triton, and a model in float32; this one is in "
            f"{str(first.dtype).removeprefix('torch.')} on {first.device.type}; leave the option out"
        )
    return _checked(wanted, model)


def _checked(precision: str, model: LoadedModel) -> str:
    """The precision; float32 where our products turn out to be wrong."""
    if precision == FLOAT32:
        return FLOAT32
    sound = _SOUND.setdefault(model.chain, {})
    if precision not in sound:
        comparisons = compared_products(model, precision)
        sound[precision] = all(comparison.holds for comparison in comparisons)
        model.chain.distrust(comparisons)
    return precision if sound[precision] else FLOAT32


def compared_products(model: LoadedModel, precision: str) -> list[Comparison]:
    """Our products beside torch's."""
    products = TensorCores([*model.chain.blocks, model.chain.head], precision).active()
    return [
        c for c in model.chain.compared_kernels(around=products) if c.kernel == PRODUCTS
    ]


class TensorCores:
    """The float32 linear layers among some modules, which multiply on tensor cores while this is active; in `float32`
    as torch does."""

    def __init__(self, modules: Iterable[nn.Module], precision: str) -> None:
        every = dict.fromkeys(
            m for outer in modules for m in outer.modules() if precision != FLOAT32
        )
        self._forwards = {
            layer: _forward(layer, precision)
            for layer in every
            if type(layer) is nn.Linear and layer.weight.dtype == torch.float32
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        with patched(pair for pair in self._forwards.items() if has_own_forward(pair[0])):
            yield


def _forward(module: nn.Linear, precision: str) -> Callable[[Tensor], Tensor]:
    from kl_lens.model.kernels.triton_products import linear

    def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.dtype != torch.float32:
            return functional.linear(input, weight, bias)
        return linear(input, weight, bias, precision)

    product = replacing(
        PRODUCTS, functional.linear, multiply, _rounding(precision, module.in_features)
    )
    return lambda input: product(input, module.weight, module.bias)
