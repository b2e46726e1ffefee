"""Weights that were tuned on text (`calibration.tuning`): the weight store reads them from the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.quantizers.base import InputStatistics, Quantizer
from kl_lens.weights.quantizers.registry import TUNED, register

if TYPE_CHECKING:
    import torch


class Tuned(Quantizer):
    name = TUNED

    def quantize(
        self, weight: torch.Tensor, fmt: Format, name: str, statistics: InputStatistics | None
    ) -> Quantized:
        raise FormatError(f"{name}: tuned weights are made by kl-lens plan --tune, for a whole plan")


register(Tuned())
