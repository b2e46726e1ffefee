"""A stored weight taken apart: FP16 scales, which its values are linear in, and codes. Both can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kl_lens.formats.base import Format, Quantized
from kl_lens.formats.blocks import LAYOUTS, read_codes, with_codes as blocks_with_codes
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.formats.integer import GroupedFormat, IntegerFormat


def scales_of(fmt: Format, quantized: Quantized) -> tuple[torch.Tensor, ...]:
    """Its scales and, where the format has them, its FP16 offsets or minima, each (…, rows, blocks); () if its values
    are not linear in FP16 scales."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes))
        return tuple(blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0] for at in _places(fmt))
    parts = (quantized.scales, quantized.zero_points)
    return tuple(part for part in parts if part is not None and part.dtype == torch.float16)


def with_scales(fmt: Format, quantized: Quantized, scales: Sequence[torch.Tensor]) -> Quantized:
    """The same codes with other scales, in the order of `scales_of`."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes)).clone()
        for at, values in zip(_places(fmt), scales, strict=True):
            blocks[..., at : at + 2] = values.half()[..., None].view(torch.uint8)
        return replace(quantized, data=blocks.flatten(-2))
    halves = [part.half() for part in scales]
    zero_points = halves[1] if len(halves) > 1 else quantized.zero_points
    return replace(quantized, scales=halves[0], zero_points=zero_points)


def _places(fmt: GGUFFormat) -> tuple[int, ...]:
    """The bytes of a block where its FP16 numbers begin."""
    if fmt.name not in LAYOUTS:  # IQ2 and IQ3
        return (0,)
    layout = LAYOUTS[fmt.name]
    return (layout.scale,) if layout.minimum is None else (layout.scale, layout.minimum)


@dataclass(frozen=True)
class Codes:
    """Evenly spaced codes: whole numbers from lowest to highest, less the zero points."""

    values: torch.Tensor  # float32, (…, rows, columns)
    zero: torch.Tensor | float  # what `with_codes` expects is the code plus this
    lowest: torch.Tensor | float
    highest: torch.Tensor | float


def codes_of(fmt: Format, quantized: Quantized) -> Codes | None:
    """None if its levels are not evenly spaced."""
    if isinstance(fmt, GGUFFormat):
        layout = LAYOUTS.get(fmt.name)
        if layout is None or layout.table:
            return None
        codes, zero = read_codes(quantized, fmt.block_size, fmt.block_bytes), float(layout.zero)
        return Codes(codes - zero, zero, -zero, layout.highest - zero)
    if isinstance(fmt, IntegerFormat):
        half = 2.0 ** (fmt.bits - 1)
        return Codes(quantized.data.float(), 0.0, -half, half - 1)
    points = quantized.zero_points
    if not isinstance(fmt, GroupedFormat) or points is None:
        return None
    if points.dtype == torch.float16:
        return Codes(quantized.data.float(), 0.0, 0.0, 2.0**fmt.bits - 1)
    columns = quantized.shape[-1] // points.shape[-1]
    zeros = points.float().repeat_interleave(columns, -1)
    return Codes(quantized.data.float() - zeros, zeros, -zeros, 2.0**fmt.bits - 1 - zeros)


def with_codes(fmt: Format, quantized: Quantized, codes: torch.Tensor) -> Quantized:
    """The same scales with other codes, whole numbers as in `Codes.values` plus `Codes.zero`."""
    if isinstance(fmt, GGUFFormat):
        return blocks_with_codes(quantized, codes, fmt.block_size, fmt.block_bytes)
    return replace(quantized, data=codes.to(quantized.data.dtype))
