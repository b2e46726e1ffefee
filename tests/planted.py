"""Kernels that are a little wrong, to be put in place of the right ones."""

from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]


def growing(kernel: Kernel, factor: float) -> Kernel:
    """A scan whose state grows by `factor` at every step: h[t]/fᵗ is the sound scan's state for inputs B[t]/fᵗ."""

    def scan(
        x: Any,
        dt: Any,
        a: Any,
        b: torch.Tensor,
        c: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> Any:
        powers = factor ** torch.arange(b.shape[1], device=b.device, dtype=torch.float64)
        powers = powers.to(b.dtype if b.dtype == torch.float64 else torch.float32)
        powers = powers.view(1, -1, *[1] * (b.dim() - 2))
        return kernel(x, dt, a, b / powers, c * powers, *more, **options)

    return scan


def larger(kernel: Kernel, factor: float) -> Kernel:
    """A kernel whose result is `factor` times too large."""
    return lambda *tensors, **options: kernel(*tensors, **options) * factor
