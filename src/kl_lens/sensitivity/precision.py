"""How exactly a GPU multiplies: `float32` on its general cores, or on tensor cores.

`tf32x3` is nearly as accurate as float32 and several times as fast. `tf32` and `bf16` are faster still, and add noise
to every number; a run reports how much. The choice is part of the run's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from kl_lens.accelerators import runs_triton
from kl_lens.checkpoints.patching import has_own_forward, patched
from kl_lens.errors import RunError

FLOAT32, TF32X3, TF32, BF16 = PRECISIONS = ("float32", "tf32x3", "tf32", "bf16")


def precision_for(wanted: str | None, model: nn.Module) -> str:
    """The wanted precision, or the fastest with float32's accuracy. Raises if the hardware does not have it."""
    first = next(model.parameters())
    possible = (
        runs_triton(first.device)
        and first.dtype == torch.float32
        and torch.cuda.get_device_capability(first.device) >= (8, 0)  # the kernels' tiles need Ampere
    )
    if wanted is None:
        return TF32X3 if possible else FLOAT32
    if wanted != FLOAT32 and not possible:
        raise RunError(
            f"--precision {wanted}: needs an Ampere GPU or later, Triton, and a model in float32; this one is in "
            f"{str(first.dtype).removeprefix('torch.')} on {first.device.type}; leave the option out"
        )
    return wanted


class TensorCores:
    """The float32 linear layers among some modules, multiplying on tensor cores."""

    bytes = 0  # nothing is kept

    def __init__(self, modules: Iterable[nn.Module], precision: str) -> None:
        self._precision = precision
        every = dict.fromkeys(m for outer in modules for m in outer.modules())
        layers = [m for m in every if type(m) is nn.Linear and m.weight.dtype == torch.float32]
        self._forwards = [(module, self._forward(module)) for module in layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        with patched(pair for pair in self._forwards if has_own_forward(pair[0])):
            yield

    def _forward(self, module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        from kl_lens.checkpoints.kernels.triton_products import linear

        def forward(input: torch.Tensor) -> torch.Tensor:
            if input.dtype != torch.float32:
                return functional.linear(input, module.weight, module.bias)
            return linear(input, module.weight, module.bias, self._precision)

        return forward


def fastest_within(noise: float, medians: Sequence[float]) -> str:
    """`tf32` where its noise lies a factor of 100 under every format's median candidate; else float32's accuracy."""
    return TF32 if medians and noise * 100 <= min(medians) else TF32X3


def accuracy_of(precision: str) -> str:
    """The accuracy that a run records: float32 and `tf32x3` count as the same."""
    return FLOAT32 if precision == TF32X3 else precision
