"""Copies of the linear layers' weights with the inputs' axis outermost, for faster products on ARM.

OpenBLAS, which torch uses there, multiplies by a matrix stored that way 4 to 7 % faster than by its transpose, which is
how checkpoints store it. The model keeps its own weights. If a layer's weight has been swapped for a candidate's, the
layer uses that and not the copy.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from kl_lens.model.patching import has_own_forward, patched


def gains_by_input_major(device: torch.device) -> bool:
    """Measured with torch's OpenBLAS on ARM; other libraries pack their operands differently."""
    return device.type == "cpu" and platform.machine() in ("aarch64", "arm64")


class FasterProducts:
    """The float32 linear layers among some modules, which multiply in a faster way while this is active."""

    bytes = 0  # of copies of weights

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = dict.fromkeys(m for outer in modules for m in outer.modules())
        self._layers = [m for m in every if type(m) is nn.Linear and m.weight.dtype == torch.float32]
        self._forwards: dict[nn.Linear, Callable[[torch.Tensor], torch.Tensor]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        with patched(pair for pair in self._forwards.items() if has_own_forward(pair[0])):
            yield


class InputMajor(FasterProducts):
    """By copies of their weights."""

    def __init__(self, modules: Iterable[nn.Module], most_bytes: int) -> None:
        """Copies weights until `most_bytes` are used."""
        super().__init__(modules)
        for layer in filter(has_own_forward, self._layers):
            weight = layer.weight.detach()
            if self.bytes + weight.nbytes > most_bytes:
                break
            self.bytes += weight.nbytes
            self._forwards[layer] = _forward(layer, weight.data_ptr(), weight.t().contiguous().t())


def _forward(module: nn.Linear, place: int, copy: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = copy if module.weight.data_ptr() == place else module.weight
        return functional.linear(input, weight, module.bias)

    return forward
