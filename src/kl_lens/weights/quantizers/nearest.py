"""The methods that need no statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.quantizers.quantizer import TUNED, InputStatistics, Quantizer, register

if TYPE_CHECKING:
    import torch


class Nearest(Quantizer):
    """The format's own rule, bit for bit the same as NNCF and ggml without data."""

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


class Tuned(Quantizer):
    """Weights that were tuned on text; the weight store reads them from the run folder."""

    name = TUNED

    def quantize(
        self, weight: torch.Tensor, fmt: Format, name: str, statistics: InputStatistics | None
    ) -> Quantized:
        raise FormatError(f"{name}: tuned weights are made by kl-lens plan --tune, for a whole plan")


register(Nearest())
