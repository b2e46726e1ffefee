"""`gptq`: error feedback onto levels that a weighed search for scales has chosen; see `feedback.py`."""

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

# Those of ggml's types where every weight has a code of its own: the keys of `blocks.LAYOUTS`, known without torch.
BLOCKS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
DAMPING = 0.1
ROUNDS = 3


class ErrorFeedback(LearningQuantizer):
    name = "gptq"

    def suits(self, fmt: Format) -> str | None:
        if isinstance(fmt, GROUPED) or fmt.name in BLOCKS:
            return None
        if isinstance(fmt, GGUFFormat):
            return f"the levels of {fmt.name} are not free of each other; use imatrix"
        return f"{fmt.name} has no levels to choose from"

    def _rounding(self, fmt: Format, moments: torch.Tensor) -> Callable[[torch.Tensor], Quantized]:
        from kl_lens.quantizers.choosing import best_rows
        from kl_lens.quantizers.feedback import Objective

        objective, importance = Objective.of(moments, DAMPING), column_importance(moments)
        ways = _on_blocks if isinstance(fmt, GGUFFormat) else _on_groups
        return lambda weight: best_rows(weight, fmt, moments, ways(weight, fmt, importance, objective))


def _on_groups(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """Rounded to nearest, with searched scales, and with error feedback from there."""
    from kl_lens.quantizers.feedback import descended, fed_back, with_fitted_scales
    from kl_lens.quantizers.scales import searched_levels, stored

    levels = searched_levels(weight, fmt, importance)
    ways = [fmt.quantize(weight), stored(fmt, levels, levels.rounded(weight))]
    codes = fed_back(weight, levels, objective)
    for _ in range(ROUNDS):
        levels = with_fitted_scales(weight, levels, codes, objective)
        codes = descended(weight, levels, codes, objective)
    return [*ways, stored(fmt, levels, codes)]


def _on_blocks(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor, objective: Objective
) -> list[Quantized]:
    """As ggml stores it, with importance, and the same blocks with codes from error feedback."""
    from kl_lens.quantizers.blocks import block_levels, with_codes
    from kl_lens.quantizers.feedback import descended, fed_back

    assert isinstance(fmt, GGUFFormat)
    weighed = fmt.quantize_with(weight, importance)
    levels = block_levels(fmt, weighed)
    codes = fed_back(weight, levels, objective)
    for _ in range(ROUNDS):
        codes = descended(weight, levels, codes, objective)
    return [fmt.quantize(weight), weighed, with_codes(fmt, weighed, codes)]


register(ErrorFeedback())
