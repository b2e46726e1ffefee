"""Faster matrix products: on tensor cores of a GPU, or on ARM by copies of weights.

`tf32x3` is nearly as accurate as float32 and several times as fast. `tf32` is faster still, and adds noise to every
number; a run reports how much. The choice is part of the run's identity.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.errors import RunError
from kl_lens.model import Chain, LoadedModel
from kl_lens.model.kernels.checking import ROUNDING, Comparison, replacing
from kl_lens.model.patching import has_own_forward, patched

FLOAT32, TF32X3, TF32 = PRECISIONS = ("float32", "tf32x3", "tf32")
PRODUCTS = "matrix products"
Forward = Callable[[torch.Tensor], torch.Tensor]
_SOUND: WeakKeyDictionary[Chain, dict[str, bool]] = WeakKeyDictionary()  # precisions that were compared


def _rounding(precision: str, depth: int) -> float:
    """Largest relative error of a sound product. Tensor cores cut off their sums instead of rounding them."""
    return 1e-3 if precision == TF32 else ROUNDING + 1e-8 * depth


def has_tensor_cores(model: LoadedModel) -> bool:
    first = next(model.model.parameters())
    return (
        runs_triton(first.device)
        and first.dtype == torch.float32
        and torch.cuda.get_device_capability(first.device) >= (8, 0)  # the kernels' tiles need Ampere
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
    known = _SOUND.setdefault(model.chain, {})
    if precision not in known:
        found = compared_products(model, precision)
        known[precision] = all(comparison.holds for comparison in found)
        model.chain.distrust(found)
    return precision if known[precision] else FLOAT32


def compared_products(model: LoadedModel, precision: str) -> list[Comparison]:
    """Our products beside torch's."""
    products = TensorCores([*model.chain.blocks, model.chain.head], precision).active()
    return [c for c in model.chain.compared_kernels(around=products) if c.kernel == PRODUCTS]


class FasterProducts:
    """The float32 linear layers among some modules, which multiply in a faster way while this is active."""

    bytes = 0  # of copies of weights

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = dict.fromkeys(m for outer in modules for m in outer.modules())
        self._layers = [m for m in every if type(m) is nn.Linear and m.weight.dtype == torch.float32]
        self._forwards: dict[nn.Linear, Forward] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        with patched(pair for pair in self._forwards.items() if has_own_forward(pair[0])):
            yield


class TensorCores(FasterProducts):
    """On tensor cores."""

    def __init__(self, modules: Iterable[nn.Module], precision: str) -> None:
        super().__init__(modules)
        self._precision = precision
        self._forwards = {layer: self._forward(layer) for layer in self._layers}

    def _forward(self, module: nn.Linear) -> Forward:
        from kl_lens.model.kernels.triton_products import linear

        def multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if input.dtype != torch.float32:
                return functional.linear(input, weight, bias)
            return linear(input, weight, bias, self._precision)

        ours = replacing(
            PRODUCTS, functional.linear, multiply, _rounding(self._precision, module.in_features)
        )
        return lambda input: ours(input, module.weight, module.bias)


def gains_by_input_major(device: torch.device) -> bool:
    """Measured with torch's OpenBLAS on ARM; other libraries pack their operands differently."""
    return device.type == "cpu" and platform.machine() in ("aarch64", "arm64")


class InputMajor(FasterProducts):
    """By copies of their weights with the inputs' axis outermost, until `most_bytes` are used.

    OpenBLAS, which torch uses on ARM, multiplies by a matrix stored that way 4 to 7 % faster than by its transpose. A
    layer whose weight has been swapped for a candidate's uses that and not the copy.
    """

    def __init__(self, modules: Iterable[nn.Module], most_bytes: int) -> None:
        super().__init__(modules)
        for layer in filter(has_own_forward, self._layers):
            weight = layer.weight.detach()
            if self.bytes + weight.nbytes > most_bytes:
                break
            self.bytes += weight.nbytes
            self._forwards[layer] = self._forward(layer, weight.data_ptr(), weight.t().contiguous().t())

    @staticmethod
    def _forward(module: nn.Linear, place: int, copy: torch.Tensor) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            weight = copy if module.weight.data_ptr() == place else module.weight
            return functional.linear(input, weight, module.bias)

        return forward


def accuracy_of(precision: str) -> str:
    """The accuracy that a run records: float32 and `tf32x3` count as the same."""
    return FLOAT32 if precision == TF32X3 else precision
