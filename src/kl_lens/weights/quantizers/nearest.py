"""Round to nearest: the format's own rule, bit for bit the same as NNCF and ggml without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.quantizers.base import InputStatistics, Quantizer
from kl_lens.weights.quantizers.registry import register

if TYPE_CHECKING:
    import torch


class Nearest(Quantizer):
    name = "rtn"

    def suits(self, fmt: Format) -> str | None:
        if fmt.needs_importance:
            return f"{fmt.name} cannot be made without calibration text; calibrate and use {fmt.name}+imatrix"
        return None

    def is_expensive(self, fmt: Format) -> bool:
        return fmt.searches

    def quantize(
        self, weight: torch.Tensor, fmt: Format, name: str, statistics: InputStatistics | None
    ) -> Quantized:
        return fmt.quantize(weight, name)


register(Nearest())
