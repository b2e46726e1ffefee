"""The methods: `rtn`, `search` and `imatrix` choose scales, `gptq` feeds errors back; tuned weights are read.

`gptq` searches scales twice: once with columns weighted by importance, once by the part of their error that later
columns cannot absorb. Which is better differs from layer to layer, so each row takes the best of both and of plain
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError
from kl_lens.base.lazy import torch
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.formats.blocks import LAYOUTS
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.quantizers.quantizer import (
    TUNED,
    InputStatistics,
    LearningQuantizer,
    Quantizer,
    best_rows,
    register,
)

if TYPE_CHECKING:
    from kl_lens.weights.quantizers.feedback import Objective


GROUPED = (
    SignedScaleFormat,
    ZeroPointFormat,
    NormalFloatFormat,
    MicroscalingFormat,
    AffineFormat,
)
# Moments from few tokens are noisy, more so with many columns. So the diagonal's mean × (DAMPING + SCARCITY · columns /
# tokens) is added to the diagonal. Both tuned by KL of reference:mamba on WikiText-2 valid: docs/method.md.
DAMPING = 0.1
SCARCITY = 4.0
ROUNDS = 3  # of coordinate descent
# Columns that were never active get this share of the mean: with weight 0, ggml would not fit them at all.
_FLOOR = 1e-6


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
        self,
        weight: torch.Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        return fmt.quantize(weight, name)


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

        importance = column_importance(moments)

        def rounding(weight: torch.Tensor) -> Quantized:
            levels = searched_levels(weight, fmt, importance)
            searched = stored(fmt, levels, levels.rounded(weight))
            return best_rows(weight, fmt, moments, [fmt.quantize(weight), searched])

        return rounding


class ImportanceMatrix(LearningQuantizer):
    name = "imatrix"

    def suits(self, fmt: Format) -> str | None:
        if not isinstance(fmt, GGUFFormat):
            return f"{fmt.name} is not one of ggml's types; use search or gptq"
        return (
            None
            if fmt.takes_importance
            else f"ggml's {fmt.name} ignores importance; use gptq, or none"
        )

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.weights.quantizers.block_scales import weighed_blocks

        assert isinstance(fmt, GGUFFormat)
        return partial(weighed_blocks, fmt, importance=column_importance(moments))


class ErrorFeedback(LearningQuantizer):
    name = "gptq"
    version = 2  # 2: damping depends on the number of tokens

    def suits(self, fmt: Format) -> str | None:
        has_levels = isinstance(fmt, (*GROUPED, GGUFFormat))
        return None if has_levels else f"{fmt.name} has no levels to choose from"

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.weights.quantizers.feedback import last_objective

        damping = DAMPING + SCARCITY * len(moments) / max(tokens, 1)
        objective = last_objective(moments, damping)
        importance = column_importance(moments)
        # In ggml's other types 4 or 8 weights share a code.
        ways = (
            _by_lattice
            if isinstance(fmt, GGUFFormat) and fmt.name not in LAYOUTS
            else _by_columns
        )
        return lambda weight: best_rows(
            weight, fmt, moments, ways(weight, fmt, importance, objective)
        )


def _by_columns(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """Plain rounding, searched scales, and error feedback with two sets of scales."""
    from kl_lens.weights.quantizers.block_scales import weighed_blocks
    from kl_lens.weights.quantizers.feedback import (
        descended,
        fed_back,
        with_fitted_scales,
    )
    from kl_lens.weights.quantizers.group_scales import searched_levels, stored
    from kl_lens.weights.quantizers.levels import block_levels, with_codes

    # Plain rounding never won a row on the references; skip it where a GPU would wait for ggml's CPU search.
    ways = [] if fmt.searches and weight.device.type != "cpu" else [fmt.quantize(weight)]
    for weighed in (importance, objective.remaining):
        if isinstance(fmt, GGUFFormat):
            searched = weighed_blocks(fmt, weight, weighed)
            levels = block_levels(fmt, searched)
        else:
            levels = searched_levels(weight, fmt, weighed)
            searched = stored(fmt, levels, levels.rounded(weight))
        if weighed is importance:
            ways.append(searched)
        codes = fed_back(weight, levels, objective)
        for _ in range(ROUNDS):
            levels = with_fitted_scales(weight, levels, codes, objective)
            codes = descended(weight, levels, codes, objective)
        if isinstance(fmt, GGUFFormat):
            ways.append(with_codes(fmt, searched, codes))
        else:
            ways.append(stored(fmt, levels, codes))
    return ways


def _by_lattice(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """ggml's with importance, and error feedback with two sets of scales."""
    from kl_lens.weights.quantizers.lattice_rounding import fed_back_blocks

    assert isinstance(fmt, GGUFFormat)
    ways = []
    for weighed in (importance, objective.remaining):
        blocks = fmt.quantize_with(weight, weighed)
        if weighed is importance:
            ways.append(blocks)
        ways.append(fed_back_blocks(fmt, weight, blocks, objective))
    return ways


class Tuned(Quantizer):
    """Weights that were tuned on text; the weight store reads them from the run folder."""

    name = TUNED

    def quantize(
        self,
        weight: torch.Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        raise FormatError(
            f"{name}: tuned weights are made by kl-lens plan --tune, for a whole plan"
        )


def column_importance(moments: torch.Tensor) -> torch.Tensor:
    """The diagonal, made positive; all ones if it is zero everywhere."""
    diagonal = moments.diagonal().clamp_min(0)
    mean = diagonal.mean()  # stays on the GPU: reading it would wait for all pending work
    floor = (mean.double() * _FLOOR).to(diagonal.dtype)
    return torch.where(mean > 0, diagonal.maximum(floor), 1.0)


# In the order in which they are listed for users.
for _method in (Nearest(), ScaleSearch(), ImportanceMatrix(), ErrorFeedback(), Tuned()):
    register(_method)
