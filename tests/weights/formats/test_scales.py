"""Scales read from stored weights and put back: the same bits, and values that are linear in them."""

from __future__ import annotations

import pytest
import torch

from kl_lens.weights.formats import get_format, known_formats
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.formats.scales import scales_of, small_scales_of, with_scales, with_small_scales


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


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"])
def test_small_scales_go_back_bit_for_bit_and_values_follow_them(name: str) -> None:
    fmt, quantized = _quantized(name, torch.randn(3, 512, generator=torch.Generator().manual_seed(0)))
    small = small_scales_of(fmt, quantized)
    assert len(small) == len(scales_of(fmt, quantized))
    assert with_small_scales(fmt, quantized, [each.values for each in small]).digest == quantized.digest
    halved = with_small_scales(fmt, quantized, [(each.values / 2).trunc() * 2 for each in small])
    ones = with_small_scales(fmt, quantized, [(each.values / 2).trunc() for each in small])
    assert torch.equal(fmt.dequantize(halved), 2 * fmt.dequantize(ones))
    assert all(each.values.amin() >= each.lowest and each.values.amax() <= each.highest for each in small)
    assert small_scales_of(get_format("q4_0"), quantized) == ()
