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


class InputMajor:
    """The float32 linear layers among some modules, with copies of their weights."""

    def __init__(self, modules: Iterable[nn.Module], most_bytes: int) -> None:
        """Copies weights until `most_bytes` are used."""
        self.bytes = 0
        self._copies: dict[nn.Linear, tuple[int, torch.Tensor]] = {}
        for module in dict.fromkeys(m for outer in modules for m in outer.modules()):
            if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
                continue
            if not has_own_forward(module):
                continue
            weight = module.weight.detach()
            if self.bytes + weight.nbytes > most_bytes:
                break
            self.bytes += weight.nbytes
            self._copies[module] = (weight.data_ptr(), weight.t().contiguous().t())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the layers multiply by the copies."""
        with patched(
            (module, _forward(module, *kept))
            for module, kept in self._copies.items()
            if has_own_forward(module)
        ):
            yield


def _forward(module: nn.Linear, place: int, copy: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = copy if module.weight.data_ptr() == place else module.weight
        return functional.linear(input, weight, module.bias)

    return forward
