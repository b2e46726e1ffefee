"""`imatrix`: ggml's scale search, columns weighted by the mean square of their inputs; on a GPU, our version of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.quantizers.learnt import LearningQuantizer
from kl_lens.weights.quantizers.quantizer import register

if TYPE_CHECKING:
    import torch

# Columns that were never active get this share of the mean: with weight 0, ggml would not fit them at all.
_FLOOR = 1e-6


class ImportanceMatrix(LearningQuantizer):
    name = "imatrix"

    def suits(self, fmt: Format) -> str | None:
        if not isinstance(fmt, GGUFFormat):
            return f"{fmt.name} is not one of ggml's types; use search or gptq"
        return None if fmt.takes_importance else f"ggml's {fmt.name} ignores importance; use gptq, or none"

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.weights.quantizers.block_scales import weighed_blocks

        assert isinstance(fmt, GGUFFormat)
        return partial(weighed_blocks, fmt, importance=column_importance(moments))


def column_importance(moments: torch.Tensor) -> torch.Tensor:
    """The diagonal, made positive; all ones if it is zero everywhere."""
    import torch

    diagonal = moments.diagonal().clamp_min(0)
    mean = diagonal.mean()  # stays on the GPU: reading it would wait for all pending work
    floor = (mean.double() * _FLOOR).to(diagonal.dtype)
    return torch.where(mean > 0, diagonal.maximum(floor), 1.0)


register(ImportanceMatrix())
