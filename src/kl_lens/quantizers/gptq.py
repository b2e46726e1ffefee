"""`gptq`: error feedback onto levels that a weighed search for scales has chosen; see `feedback.py`.

Scales are searched twice: with columns weighed by their importance, and by what later columns cannot make up for.
Which of the two does better differs from layer to layer, so every row takes the better, or what rounding alone gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kl_lens.formats import Format, Quantized
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.quantizers.importance import column_importance
from kl_lens.quantizers.learnt import LearningQuantizer
from kl_lens.quantizers.registry import register
from kl_lens.quantizers.search import GROUPED

if TYPE_CHECKING:
    import torch

    from kl_lens.quantizers.feedback import Objective

# Those of ggml's types where every weight has a code of its own: `formats.blocks.LAYOUTS`, known without torch.
BLOCKS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
# Moments of few tokens are known badly, and the more columns there are the worse: the mean of the diagonal is added
# to it, times DAMPING + SCARCITY · columns / tokens. Both by KL of reference:mamba on WikiText-2 valid: docs/method.md.
DAMPING, SCARCITY = 0.1, 4.0
ROUNDS = 3  # of coordinate descent


class ErrorFeedback(LearningQuantizer):
    name = "gptq"
    version = 2  # 2: damping by the number of tokens

    def suits(self, fmt: Format) -> str | None:
        if isinstance(fmt, GROUPED) or fmt.name in BLOCKS:
            return None
        if isinstance(fmt, GGUFFormat):
            return f"the levels of {fmt.name} are not free of each other; use imatrix"
        return f"{fmt.name} has no levels to choose from"

    def _rounding(
        self, fmt: Format, moments: torch.Tensor, tokens: int
    ) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.quantizers.choosing import best_rows
        from kl_lens.quantizers.feedback import Objective

        damping = DAMPING + SCARCITY * len(moments) / max(tokens, 1)
        objective, importance = Objective.of(moments, damping), column_importance(moments)
        ways = _on_blocks if isinstance(fmt, GGUFFormat) else _on_groups
        return lambda weight: best_rows(weight, fmt, moments, ways(weight, fmt, importance, objective))


def _on_groups(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """Rounded to nearest, with searched scales, and with error feedback from two sets of scales."""
    from kl_lens.quantizers.feedback import descended, fed_back, with_fitted_scales
    from kl_lens.quantizers.scales import searched_levels, stored

    ways = [fmt.quantize(weight)]
    for weighed in (importance, objective.remaining):
        levels = searched_levels(weight, fmt, weighed)
        if weighed is importance:
            ways.append(stored(fmt, levels, levels.rounded(weight)))
        codes = fed_back(weight, levels, objective)
        for _ in range(ROUNDS):
            levels = with_fitted_scales(weight, levels, codes, objective)
            codes = descended(weight, levels, codes, objective)
        ways.append(stored(fmt, levels, codes))
    return ways


def _on_blocks(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """As ggml stores it, with importance, and with error feedback on two sets of scales."""
    from kl_lens.quantizers.block_scales import weighed_blocks
    from kl_lens.quantizers.blocks import block_levels, with_codes
    from kl_lens.quantizers.feedback import descended, fed_back

    assert isinstance(fmt, GGUFFormat)
    # Rounding alone never won a row on the references; where a GPU would wait for ggml's search, it is left out.
    ways = [] if fmt.searches and weight.device.type != "cpu" else [fmt.quantize(weight)]
    for weighed in (importance, objective.remaining):
        blocks = weighed_blocks(fmt, weight, weighed)
        if weighed is importance:
            ways.append(blocks)
        levels = block_levels(fmt, blocks)
        codes = fed_back(weight, levels, objective)
        for _ in range(ROUNDS):
            codes = descended(weight, levels, codes, objective)
        ways.append(with_codes(fmt, blocks, codes))
    return ways


class InOrder(ErrorFeedback):
    """`gptq` of a corrected weight on the inputs that a plan's earlier components give; see `calibration.in_order`."""

    name = "ordered"
    of_a_plan = True


register(ErrorFeedback())
register(InOrder())
