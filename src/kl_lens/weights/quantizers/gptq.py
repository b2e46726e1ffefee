"""`gptq`: error feedback (`feedback.py`) with scales from an importance-weighted search.

Scales are searched twice: once with columns weighted by importance, once by the part of their error that later columns
cannot absorb. Which is better differs from layer to layer, so each row takes the best of both and of plain rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.quantizers.importance import column_importance
from kl_lens.weights.quantizers.learnt import LearningQuantizer
from kl_lens.weights.quantizers.quantizer import register
from kl_lens.weights.quantizers.search import GROUPED

if TYPE_CHECKING:
    import torch

    from kl_lens.weights.quantizers.feedback import Objective

# ggml's types where every weight has its own code: `formats.blocks.LAYOUTS`, repeated to avoid importing torch.
BLOCKS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
LATTICES = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")  # where 4 or 8 weights share a code
# Moments from few tokens are noisy, more so with many columns. So the diagonal's mean × (DAMPING + SCARCITY · columns /
# tokens) is added to the diagonal. Both tuned by KL of reference:mamba on WikiText-2 valid: docs/method.md.
DAMPING, SCARCITY = 0.1, 4.0
ROUNDS = 3  # of coordinate descent


class ErrorFeedback(LearningQuantizer):
    name = "gptq"
    version = 2  # 2: damping depends on the number of tokens

    def suits(self, fmt: Format) -> str | None:
        if isinstance(fmt, GROUPED) or fmt.name in (*BLOCKS, *LATTICES):
            return None
        return f"{fmt.name} has no levels to choose from"

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.weights.quantizers.feedback import last_objective
        from kl_lens.weights.quantizers.learnt import best_rows

        damping = DAMPING + SCARCITY * len(moments) / max(tokens, 1)
        objective, importance = last_objective(moments, damping), column_importance(moments)
        ways = _by_lattice if fmt.name in LATTICES else _by_columns
        return lambda weight: best_rows(weight, fmt, moments, ways(weight, fmt, importance, objective))


def _by_columns(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """Plain rounding, searched scales, and error feedback with two sets of scales."""
    from kl_lens.weights.quantizers.block_scales import weighed_blocks
    from kl_lens.weights.quantizers.feedback import descended, fed_back, with_fitted_scales
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
        blocks = isinstance(fmt, GGUFFormat)
        ways.append(with_codes(fmt, searched, codes) if blocks else stored(fmt, levels, codes))  # type: ignore[arg-type]
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


register(ErrorFeedback())
