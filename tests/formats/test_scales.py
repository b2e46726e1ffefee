"""Scales read from stored weights and put back: the same bits, and values that are linear in them."""

from __future__ import annotations

import pytest
import torch

from kl_lens.formats import get_format, known_formats
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.formats.scales import scales_of, with_scales


def _quantized(name: str, weight: torch.Tensor):  # type: ignore[no-untyped-def]
    fmt = get_format(name)
    if isinstance(fmt, GGUFFormat) and fmt.needs_importance:
        return fmt, fmt.quantize_with(weight, torch.ones(weight.shape[-1]))
    return fmt, fmt.quantize(weight)


# IQ2's tables take seconds to build; IQ2_XXS stands for them.
@pytest.mark.parametrize("name", [name for name in known_formats() if name not in ("iq2_xs", "iq2_s")])
def test_values_are_linear_in_the_scales_and_the_scales_go_back_bit_for_bit(name: str) -> None:
    fmt, quantized = _quantized(name, torch.randn(2, 512, generator=torch.Generator().manual_seed(0)))
    scales = scales_of(fmt, quantized)
    if not scales:
        assert quantized.scales is None or quantized.scales.dtype != torch.float16
        return
    assert with_scales(fmt, quantized, scales).digest == quantized.digest
    doubled = with_scales(fmt, quantized, [2 * scale for scale in scales])
    assert torch.equal(fmt.dequantize(doubled), 2 * fmt.dequantize(quantized))
    nothing = with_scales(fmt, quantized, [torch.zeros_like(scale) for scale in scales])
    assert not fmt.dequantize(nothing).any()
