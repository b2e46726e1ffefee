"""Stored weights taken apart and put together again: the same bits, and values that are linear in the scales."""

from __future__ import annotations

import pytest
import torch

from kl_lens.formats import get_format, known_formats
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.formats.parts import codes_of, scales_of, with_codes, with_scales

EVEN = (
    "int4-g64",
    "int8",
    "uint4-g32",
    "affine3-g64",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q6_k",
)


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
        assert name in ("fp16", "int8-absmax", "int4-absmax")
        return
    assert with_scales(fmt, quantized, scales).digest == quantized.digest
    doubled = with_scales(fmt, quantized, [2 * scale for scale in scales])
    assert torch.equal(fmt.dequantize(doubled), 2 * fmt.dequantize(quantized))
    nothing = with_scales(fmt, quantized, [torch.zeros_like(scale) for scale in scales])
    assert not fmt.dequantize(nothing).any()


@pytest.mark.parametrize("name", EVEN)
def test_codes_go_back_bit_for_bit_and_a_step_of_one_moves_the_value_by_the_scale(name: str) -> None:
    fmt, quantized = _quantized(name, torch.randn(2, 512, generator=torch.Generator().manual_seed(0)))
    codes = codes_of(fmt, quantized)
    assert codes is not None
    assert with_codes(fmt, quantized, codes.values + codes.zero).digest == quantized.digest
    assert bool((codes.values >= codes.lowest).all())
    assert bool((codes.values <= codes.highest).all())
    at = [
        fmt.dequantize(with_codes(fmt, quantized, torch.full((2, 512), c) + codes.zero)) for c in (0.0, 1.0)
    ]
    values = at[0] + (at[1] - at[0]) * codes.values
    torch.testing.assert_close(fmt.dequantize(quantized), values, rtol=1e-5, atol=1e-6)
