"""The scale search that ggml does on a CPU with an importance matrix, in torch for a GPU.

As in ggml, a weight x counts importance × √(mean square + x²). Several scales are tried around the smallest one that
covers the group, and the one with the least error is kept. Here all tries of many groups run at once. The groups'
scales are then rounded, with the same search, to the few bits that a block has for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_lens.base.accelerators import constant, elements_at_once
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.blocks import (
    IQ4_LEVELS,
    LAYOUTS,
    Layout,
    iq4_levels,
    with_codes,
    with_scales,
)
from kl_lens.weights.formats.gguf_blocks import SMALLEST_MAGNITUDE, GGUFFormat
from kl_lens.weights.quantizers.levels import block_levels

_REFITS = 2
# Where a group's largest weight may lie, relative to the last code.
_NEAR = torch.linspace(-0.9, 0.9, 19)
# The same for a block's largest scale; wider, because there are few scales.
_WIDE = torch.linspace(-4.0, 2.0, 61)


def weighed_blocks(fmt: GGUFFormat, weight: Tensor, importance: Tensor) -> Quantized:
    """A weight (rows, columns) in a type's blocks; importance (columns,). Uses ggml's own code on a CPU, and for
    types where weights share codes."""
    if weight.device.type == "cpu" or fmt.name not in LAYOUTS:
        return fmt.quantize_with(weight, importance)
    return searched_blocks(fmt, weight, importance)


def searched_blocks(fmt: GGUFFormat, weight: Tensor, importance: Tensor) -> Quantized:
    """The same with this module's search, on any device."""
    layout = LAYOUTS[fmt.name]
    if not fmt.takes_importance:
        return fmt.quantize(weight)
    values = torch.nn.functional.hardshrink(weight, SMALLEST_MAGNITUDE)
    importance = importance / importance.max()
    tries = 37 if layout.minimum is not None else 19
    step = max(1, elements_at_once(values.device) // tries // values.shape[1])
    fitted = _symmetric if layout.minimum is None else _with_minimum
    parts = []
    for rows in values.split(step):
        x = rows.reshape(-1, layout.size // layout.group, layout.group)
        weigh = _weighed(fmt, rows, importance).reshape(x.shape)
        parts.append(with_scales(layout, *fitted(layout, x, weigh)))
    data = torch.cat(parts).reshape(len(weight), -1)
    bare = Quantized(fmt.name, tuple(weight.shape), data)
    return with_codes(bare, block_levels(bare).rounded(values))


def _weighed(fmt: GGUFFormat, rows: Tensor, importance: Tensor) -> Tensor:
    """How much every weight counts, as in ggml's code for this type."""
    if fmt.name == "q6_k":
        return importance.expand_as(rows)
    squares = rows.square()
    simple = fmt.name in ("q4_0", "q4_1", "q5_0", "q5_1")  # these look at whole rows
    grouped = squares if simple else squares.unflatten(1, (-1, fmt.block_size))
    mean = grouped.mean(-1, keepdim=True) * (1 if simple or fmt.name == "q2_k" else 2)
    return importance * (mean + grouped).sqrt_().flatten(1)


# A block's scale and minimum, and the small scales of its groups.
Scales = tuple[Tensor, Tensor | None, Tensor | None]


def _symmetric(layout: Layout, x: Tensor, weigh: Tensor) -> Scales:
    """x and weigh: (blocks, groups, columns of a group)."""
    if layout.table:
        largest = float(IQ4_LEVELS[0])
        ends = torch.cat([torch.arange(-7.0, 8.0) + largest, torch.tensor([-largest])])
        scales = _fitted(x, weigh, ends, table=iq4_levels(x.device))
    else:
        lowest = -layout.zero
        scales = _fitted(x, weigh, _NEAR + lowest, lowest, layout.highest + lowest)
    if not layout.small_highest:
        return scales[:, 0], None, None
    lowest = -layout.small_zero
    whole, small = _stored(scales, weigh.sum(-1), lowest, layout.small_highest + lowest)
    return whole, None, small


def _with_minimum(layout: Layout, x: Tensor, weigh: Tensor) -> Scales:
    scales, minima = _line(x, weigh, layout.highest)
    if not layout.small_highest:
        return scales[:, 0], minima[:, 0], None
    top = layout.small_highest
    counts = weigh.sum(-1)
    whole, small = _stored(scales.clamp_min(0), counts, 0, top)
    minimum, small_minima = _stored(-minima, counts, 0, top)
    return whole, minimum, torch.cat([small, small_minima], 1)


def _fitted(
    x: Tensor,
    weigh: Tensor,
    ends: Tensor,
    lowest: int = 0,
    highest: int = 0,
    table: Tensor | None = None,
) -> Tensor:
    """The best s (…,) with x ≈ s · code, for x (…, columns): codes from the scales that put the largest x at each
    of `ends`, s by least squares."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    inverses = _divided(constant(ends, x.device), largest)
    codes = _rounded(x.unsqueeze(-2) * inverses.unsqueeze(-1), lowest, highest, table)
    product = _summed(codes, weigh * x)
    square = _summed(codes.square_(), weigh)
    best = _divided(product.square(), square).argmax(-1, keepdim=True)
    return _divided(product, square).gather(-1, best).squeeze(-1)


def _stored(
    scales: Tensor, counts: Tensor, lowest: int, highest: int
) -> tuple[Tensor, Tensor]:
    """A block's scales (blocks, groups) as one FP16 number per block, (blocks,), times small codes."""
    ends = lowest - _WIDE if lowest else highest + _WIDE
    whole = _fitted(scales, counts, ends, lowest, highest)
    for _ in range(_REFITS):
        codes = _rounded(_divided(scales, whole[:, None]), lowest, highest)
        product = (counts * scales * codes).sum(-1)
        fit = _divided(product, (counts * codes.square()).sum(-1))
        whole = torch.where(fit == 0, whole, fit)
    whole = whole.half().float()
    return whole, _rounded(_divided(scales, whole[:, None]), lowest, highest)


def _line(x: Tensor, weigh: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """The best s and m ≤ 0, (…,) each, with x ≈ s · code + m: codes from scales around the smallest that covers the
    group, s and m by least squares; then once more starting from that m."""
    low = x.amin(-1).clamp_max(0)
    y = x - low.unsqueeze(-1)
    span = y.amax(-1)
    total = weigh.sum(-1, keepdim=True)
    first = (weigh * y).sum(-1, keepdim=True)
    ends = constant(torch.linspace(-0.9, 0.9, 37) + highest, x.device)
    scale = span / highest
    shift = torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for _ in range(2):
        inverses = _divided(ends, (span - shift).unsqueeze(-1))
        shifted = (y - shift.unsqueeze(-1)).unsqueeze(-2)
        codes = _rounded(shifted * inverses.unsqueeze(-1), 0, highest)
        sums = _summed(codes, weigh)
        products = _summed(codes, weigh * y)
        squares = _summed(codes.square_(), weigh)
        spread = total * squares - sums.square()
        slope = (total * products - first * sums) / spread
        start = (squares * first - sums * products) / spread
        most = -low.unsqueeze(-1)
        slope = torch.where(start > most, (products - most * sums) / squares, slope)
        start = torch.minimum(start, most)
        # Σ w (s c + t − y)² less Σ w y²
        loss = slope * (slope * squares + 2 * (start * sums - products))
        loss = loss + start * (start * total - 2 * first)
        loss = torch.where(spread > 1e-6 * total * squares, loss, torch.inf)
        value, best = loss.min(-1, keepdim=True)
        better = value.squeeze(-1) < least
        least = torch.where(better, value.squeeze(-1), least)
        scale = torch.where(better, slope.gather(-1, best).squeeze(-1), scale)
        shift = torch.where(better, start.gather(-1, best).squeeze(-1), shift)
    return scale, low + shift


def _rounded(
    scaled: Tensor, lowest: int, highest: int, table: Tensor | None = None
) -> Tensor:
    if table is None:
        return scaled.round_().clamp_(lowest, highest)
    return table[torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)]


def _summed(codes: Tensor, weigh: Tensor) -> Tensor:
    """Σ codes · weigh over columns, (…, tries) of (…, tries, columns)."""
    return (codes @ weigh.unsqueeze(-1)).squeeze(-1)


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0, a / b)
