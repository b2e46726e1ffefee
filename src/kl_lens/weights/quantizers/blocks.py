"""ggml's blocks as levels: the values that a block's scales allow, and codes written back into its bytes."""

from __future__ import annotations

import torch

from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.blocks import IQ4_LEVELS, LAYOUTS, with_codes as _with_codes
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.quantizers.levels import Levels


def block_levels(fmt: GGUFFormat, quantized: Quantized) -> Levels:
    """The values that each code stands for, given the scales of a quantized matrix."""
    layout = LAYOUTS[fmt.name]

    def all_at(code: int) -> torch.Tensor:
        codes = torch.full(quantized.shape, float(code), device=quantized.data.device)
        return fmt.dequantize(with_codes(fmt, quantized, codes))[:, :: layout.group].contiguous()

    if layout.table:
        # Code 8 is level 1, so its value is the scale.
        table = tuple(float(level) for level in IQ4_LEVELS)
        return Levels(layout.group, all_at(8), 0, layout.highest, table=table)
    lowest, highest = all_at(0), all_at(layout.highest)
    return Levels(layout.group, (highest - lowest) / layout.highest, 0, layout.highest, offsets=lowest)


def with_codes(fmt: GGUFFormat, quantized: Quantized, codes: torch.Tensor) -> Quantized:
    """The same blocks with other codes, (rows, columns)."""
    return _with_codes(quantized, codes, fmt.block_size, fmt.block_bytes)
