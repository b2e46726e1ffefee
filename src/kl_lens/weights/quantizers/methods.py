"""The methods: `rtn`, `search` and `imatrix` choose scales, `gptq` feeds errors back; tuned weights are read.

`gptq` searches scales twice: once with columns weighted by importance, once by the part of their error that later
columns cannot absorb. Which is better differs from layer to layer, so each row takes the best of both and of plain
rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError
from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.blocks import LAYOUTS, with_codes
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.formats.integer import AbsoluteMaximumFormat, GroupedFormat
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
    from kl_lens.weights.quantizers.levels import Levels


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


class ScaleSearch(LearningQuantizer):
    name = "search"

    def suits(self, fmt: Format) -> str | None:
        if _is_grouped(fmt):
            return None
        if isinstance(fmt, GGUFFormat):
            return f"ggml searches the scales of {fmt.name} itself; use imatrix or gptq"
        return f"{fmt.name} has no scales to choose"

    def _rounded(
        self, weight: Tensor, fmt: Format, moments: Tensor, tokens: int
    ) -> Quantized:
        searched = _searched(weight, fmt, column_importance(moments))[0]
        return best_rows(weight, fmt, moments, [fmt.quantize(weight), searched])


class ImportanceMatrix(LearningQuantizer):
    name = "imatrix"

    def suits(self, fmt: Format) -> str | None:
        if not isinstance(fmt, GGUFFormat):
            return f"{fmt.name} is not one of ggml's types; use search or gptq"
        if fmt.takes_importance:
            return None
        return f"ggml's {fmt.name} ignores importance; use gptq, or none"

    def _rounded(
        self, weight: Tensor, fmt: Format, moments: Tensor, tokens: int
    ) -> Quantized:
        from kl_lens.weights.quantizers.block_scales import weighed_blocks

        assert isinstance(fmt, GGUFFormat)
        return weighed_blocks(fmt, weight, column_importance(moments))


class ErrorFeedback(LearningQuantizer):
    name = "gptq"
    version = 2  # 2: damping depends on the number of tokens

    def suits(self, fmt: Format) -> str | None:
        has_levels = isinstance(fmt, GGUFFormat) or _is_grouped(fmt)
        return None if has_levels else f"{fmt.name} has no levels to choose from"

    def _rounded(
        self, weight: Tensor, fmt: Format, moments: Tensor, tokens: int
    ) -> Quantized:
        from kl_lens.weights.quantizers.feedback import last_objective

        damping = DAMPING + SCARCITY * len(moments) / max(tokens, 1)
        objective = last_objective(moments, damping)
        # In ggml's other types 4 or 8 weights share a code.
        is_lattice = isinstance(fmt, GGUFFormat) and fmt.name not in LAYOUTS
        feed = _by_lattice if is_lattice else _by_columns
        choices = list(feed(weight, fmt, column_importance(moments), objective))
        choices.append(feed(weight, fmt, objective.remaining, objective)[1])
        # Plain rounding never won a row on the references; skip it where a GPU would wait for ggml's CPU search.
        waits = fmt.searches and weight.device.type != "cpu"
        if not (waits or is_lattice):
            choices.insert(0, fmt.quantize(weight))
        return best_rows(weight, fmt, moments, choices)


def _is_grouped(fmt: Format) -> bool:
    """Whether it has scales to choose, and a runtime that stores them."""
    return isinstance(fmt, GroupedFormat) and not isinstance(fmt, AbsoluteMaximumFormat)


def _searched(
    weight: Tensor, fmt: Format, importance: Tensor
) -> tuple[Quantized, Levels]:
    """With searched scales, and the levels they give."""
    from kl_lens.weights.quantizers.block_scales import weighed_blocks
    from kl_lens.weights.quantizers.group_scales import searched_levels, stored
    from kl_lens.weights.quantizers.levels import block_levels

    if isinstance(fmt, GGUFFormat):
        searched = weighed_blocks(fmt, weight, importance)
        return searched, block_levels(searched)
    levels = searched_levels(weight, fmt, importance)
    return stored(fmt, levels, levels.rounded(weight)), levels


def _by_columns(
    weight: Tensor, fmt: Format, importance: Tensor, objective: Objective
) -> tuple[Quantized, Quantized]:
    """With searched scales, and the same with error feedback."""
    from kl_lens.weights.quantizers.feedback import (
        descended,
        fed_back,
        with_fitted_scales,
    )
    from kl_lens.weights.quantizers.group_scales import stored

    searched, levels = _searched(weight, fmt, importance)
    codes = fed_back(weight, levels, objective)
    for _ in range(ROUNDS):
        levels = with_fitted_scales(weight, levels, codes, objective)
        codes = descended(weight, levels, codes, objective)
    if isinstance(fmt, GGUFFormat):
        return searched, with_codes(searched, codes)
    return searched, stored(fmt, levels, codes)


def _by_lattice(
    weight: Tensor, fmt: Format, importance: Tensor, objective: Objective
) -> tuple[Quantized, Quantized]:
    from kl_lens.weights.quantizers.lattice_rounding import fed_back_blocks

    assert isinstance(fmt, GGUFFormat)
    blocks = fmt.quantize_with(weight, importance)
    return blocks, fed_back_blocks(fmt, weight, blocks, objective)


class Tuned(Quantizer):
    """Weights that were tuned on text; the weight store reads them from the run folder."""

    name = TUNED

    def quantize(
        self,
        weight: Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        raise FormatError(
            f"{name}: tuned weights are made by kl-lens plan --tune, for a whole plan"
        )


def column_importance(moments: Tensor) -> Tensor:
    """The diagonal, made positive; all ones if it is zero everywhere."""
    diagonal = moments.diagonal().clamp_min(0)
    mean = diagonal.mean()  # stays on the GPU: reading it would wait for all pending work
    floor = (mean.double() * _FLOOR).to(diagonal.dtype)
    return torch.where(mean > 0, diagonal.maximum(floor), 1.0)


# In the order in which they are listed for users.
for _method in (Nearest(), ScaleSearch(), ImportanceMatrix(), ErrorFeedback(), Tuned()):
    register(_method)
