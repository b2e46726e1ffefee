"""The scales of a stored weight, read and replaced: FP16 numbers that its values are linear in and, in ggml's blocks,
the small whole numbers that each of them is multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kl_lens.weights.formats.blocks import LAYOUTS, small_scales, write_small_scales
from kl_lens.weights.formats.format import Format, Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat


def scales_of(fmt: Format, quantized: Quantized) -> tuple[torch.Tensor, ...]:
    """Its scales and, where the format has them, its FP16 offsets or minima, each (…, rows, blocks); () if its values
    are not linear in FP16 scales."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes))
        return tuple(
            blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]
            for at in _places(fmt)
        )
    parts = (quantized.scales, quantized.zero_points)
    return tuple(
        part for part in parts if part is not None and part.dtype == torch.float16
    )


def with_scales(
    fmt: Format, quantized: Quantized, scales: Sequence[torch.Tensor]
) -> Quantized:
    """The same codes with other scales, in the order of `scales_of`."""
    if isinstance(fmt, GGUFFormat):
        blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes)).clone()
        for at, values in zip(_places(fmt), scales, strict=True):
            blocks[..., at : at + 2] = values.half()[..., None].view(torch.uint8)
        return replace(quantized, data=blocks.flatten(-2))
    halves = [part.half() for part in scales]
    zero_points = halves[1] if len(halves) > 1 else quantized.zero_points
    return replace(quantized, scales=halves[0], zero_points=zero_points)


@dataclass(frozen=True)
class SmallScales:
    values: torch.Tensor  # whole numbers in float32, (…, rows, blocks, groups)
    lowest: int
    highest: int


def small_scales_of(fmt: Format, quantized: Quantized) -> tuple[SmallScales, ...]:
    """One for each of `scales_of`; () if the format has none."""
    if not (
        isinstance(fmt, GGUFFormat)
        and (layout := LAYOUTS.get(fmt.name))
        and layout.small_highest
    ):
        return ()
    blocks = quantized.data.unflatten(-1, (-1, fmt.block_bytes))
    groups = fmt.block_size // layout.group
    small = small_scales(layout, blocks.flatten(0, -2), groups).view(
        *blocks.shape[:-1], -1
    )
    ends = -layout.small_zero, layout.small_highest - layout.small_zero
    return tuple(SmallScales(part, *ends) for part in small.split(groups, -1))


def with_small_scales(
    fmt: Format, quantized: Quantized, small: Sequence[torch.Tensor]
) -> Quantized:
    """The same codes and FP16 numbers with other small scales, in the order of `small_scales_of`."""
    assert isinstance(fmt, GGUFFormat)
    blocks = quantized.data.reshape(-1, fmt.block_bytes).clone()
    write_small_scales(
        LAYOUTS[fmt.name], blocks, torch.cat(list(small), -1).flatten(0, -2)
    )
    return replace(quantized, data=blocks.reshape(quantized.data.shape))


def _places(fmt: GGUFFormat) -> tuple[int, ...]:
    """The bytes of a block where its FP16 numbers begin."""
    if fmt.name not in LAYOUTS:  # IQ2 and IQ3
        return (0,)
    layout = LAYOUTS[fmt.name]
    return (layout.scale,) if layout.minimum is None else (layout.scale, layout.minimum)
