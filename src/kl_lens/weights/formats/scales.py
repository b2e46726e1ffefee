"""The scales of a stored weight, read and replaced: FP16 numbers that its values are linear in and, in ggml's blocks,
the small whole numbers that each of them is multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kl_lens.weights.formats.blocks import LAYOUTS, small_scales, write_small_scales
from kl_lens.weights.formats.format import Format, Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat


def scales_of(fmt: Format, quantized: Quantized) -> tuple[Tensor, ...]:
    """Its scales and, where the format has them, its FP16 offsets or minima, each (…, rows, blocks); () if its values
    are not linear in FP16 scales."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes))
        halves = (blocks[..., start : start + 2] for start in _starts(fmt))
        return tuple(half.contiguous().view(torch.float16)[..., 0] for half in halves)
    parts = (quantized.scales, quantized.zero_points)
    return tuple(
        part for part in parts if part is not None and part.dtype == torch.float16
    )


def with_scales(fmt: Format, quantized: Quantized, scales: Sequence[Tensor]) -> Quantized:
    """The same codes with other scales, in the order of `scales_of`."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes)).clone()
        for start, values in zip(_starts(fmt), scales, strict=True):
            blocks[..., start : start + 2] = values.half()[..., None].view(torch.uint8)
        return replace(quantized, data=blocks.flatten(-2))
    halves = [part.half() for part in scales]
    zero_points = halves[1] if len(halves) > 1 else quantized.zero_points
    return replace(quantized, scales=halves[0], zero_points=zero_points)


@dataclass(frozen=True)
class SmallScales:
    values: Tensor  # whole numbers in float32, (…, rows, blocks, groups)
    lowest: int
    highest: int


def small_scales_of(fmt: Format, quantized: Quantized) -> tuple[SmallScales, ...]:
    """One for each of `scales_of`; () if the format has none."""
    layout = LAYOUTS.get(fmt.name)
    if layout is None or not layout.small_highest:
        return ()
    blocks = quantized.data.unflatten(-1, (-1, layout.bytes))
    small = small_scales(layout, blocks.flatten(0, -2)).view(*blocks.shape[:-1], -1)
    ends = -layout.small_zero, layout.small_highest - layout.small_zero
    parts = small.split(layout.size // layout.group, -1)
    return tuple(SmallScales(part, *ends) for part in parts)


def with_small_scales(
    fmt: Format, quantized: Quantized, small: Sequence[Tensor]
) -> Quantized:
    """The same codes and FP16 numbers with other small scales, in the order of `small_scales_of`."""
    layout = LAYOUTS[fmt.name]
    blocks = quantized.data.reshape(-1, layout.bytes).clone()
    write_small_scales(layout, blocks, torch.cat(list(small), -1).flatten(0, -2))
    return replace(quantized, data=blocks.reshape(quantized.data.shape))


def _starts(fmt: GGUFFormat) -> tuple[int, ...]:
    """The bytes of a block where its FP16 numbers begin."""
    if fmt.name not in LAYOUTS:  # IQ2 and IQ3
        return (0,)
    layout = LAYOUTS[fmt.name]
    return (layout.scale,) if layout.minimum is None else (layout.scale, layout.minimum)
