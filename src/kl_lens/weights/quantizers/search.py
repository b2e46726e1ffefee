"""`search`: the scales with the least loss, columns weighted by the mean square of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.formats.integer import SignedScaleFormat
from kl_lens.weights.formats.microscaling import MicroscalingFormat
from kl_lens.weights.formats.normal_float import NormalFloatFormat
from kl_lens.weights.formats.zero_points import ZeroPointFormat
from kl_lens.weights.quantizers.importance import column_importance
from kl_lens.weights.quantizers.learnt import LearningQuantizer
from kl_lens.weights.quantizers.quantizer import register

if TYPE_CHECKING:
    import torch

GROUPED = (SignedScaleFormat, ZeroPointFormat, NormalFloatFormat, MicroscalingFormat, AffineFormat)


class ScaleSearch(LearningQuantizer):
    name = "search"

    def suits(self, fmt: Format) -> str | None:
        if isinstance(fmt, GROUPED):
            return None
        if isinstance(fmt, GGUFFormat):
            return f"ggml searches the scales of {fmt.name} itself; use imatrix or gptq"
        return f"{fmt.name} has no scales to choose"

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.weights.quantizers.group_scales import searched_levels, stored
        from kl_lens.weights.quantizers.learnt import best_rows

        importance = column_importance(moments)

        def rounding(weight: torch.Tensor) -> Quantized:
            levels = searched_levels(weight, fmt, importance)
            searched = stored(fmt, levels, levels.rounded(weight))
            return best_rows(weight, fmt, moments, [fmt.quantize(weight), searched])

        return rounding


register(ScaleSearch())
