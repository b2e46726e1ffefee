"""The scales (and zero points, or biases) with the least loss for OpenVINO's and MLX's grids, columns weighted by
importance.

For every group, scales are tried around the smallest that covers it, with both signs where the integer range is
asymmetric. Given the integers q (less the zero point), the best scale is s = Σ h w q / Σ h q² and its loss
Σ h w² − s Σ h w q, so a try costs one pass. Then the group is rounded with the stored scale and fitted again, for as
long as that helps. With a free bias the same holds for w and q less their weighted means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy import float32
from torch import Tensor

from kl_lens.base.accelerators import constant
from kl_lens.base.compiling import njit, prange
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.formats.integer import (
    NNCF_SMALLEST_SCALE,
    GroupedFormat,
    SignedScaleFormat,
    ZeroPointFormat,
)
from kl_lens.weights.formats.tables import (
    MX_LEVELS,
    NF_LEVELS,
    MicroscalingFormat,
    NormalFloatFormat,
)
from kl_lens.weights.quantizers.levels import Levels

_FACTORS = torch.linspace(0.5, 1.1, 19)  # times the smallest scale that covers a group
_REFITS = 4


def searched_levels(weight: Tensor, fmt: Format, importance: Tensor) -> Levels:
    """Levels of a weight (rows, columns) in a grouped format; importance (columns,), positive."""
    group = fmt.group_size or weight.shape[-1]
    groups = weight.reshape(-1, group)
    weigh = importance.reshape(-1, group)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    if isinstance(fmt, SignedScaleFormat):
        top = 2 ** (fmt.bits - 1)
        plain = Levels(group, torch.maximum(-low, high) / top, -top, top - 1)
        best = _best(groups, weigh, plain, factors=torch.cat([_FACTORS, -_FACTORS]))
    elif isinstance(fmt, ZeroPointFormat):
        top = 2**fmt.bits - 1
        low = low.clamp(max=0)
        span = (high.clamp(min=0) - low).clamp_min(NNCF_SMALLEST_SCALE)
        zeros = (-low * top / span).round()
        plain = Levels(group, span / top, 0, top, zero_points=zeros)
        best = _best(groups, weigh, plain, shifts=(-1.0, 0.0, 1.0))
    elif isinstance(fmt, AffineFormat):
        best = _best_affine(groups, weigh.repeat(len(weight), 1), 2**fmt.bits - 1)
    elif isinstance(fmt, MicroscalingFormat):
        best = _best_powers(groups, weigh.repeat(len(weight), 1), fmt)
    else:
        assert isinstance(fmt, NormalFloatFormat)
        table = tuple(NF_LEVELS.tolist())
        plain = Levels(group, torch.maximum(-low, high), 0, len(table) - 1, table=table)
        best = _best(groups, weigh, plain)

    def by_row(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.view(weight.shape[0], -1)

    return replace(
        best,
        scales=best.scales.view(weight.shape[0], -1),
        zero_points=by_row(best.zero_points),
        offsets=by_row(best.offsets),
    )


def stored(fmt: Format, levels: Levels, codes: Tensor) -> Quantized:
    """These codes as an artifact stores them."""
    assert isinstance(fmt, GroupedFormat)
    zero_points = None
    if levels.zero_points is not None:
        zero_points = levels.zero_points.to(torch.uint8)
    elif levels.offsets is not None:
        zero_points = levels.offsets.half()
    integers = codes.to(torch.uint8 if levels.lowest == 0 else torch.int8)
    scales = fmt.stored_scales(levels.scales)
    return Quantized(fmt.name, tuple(codes.shape), integers, scales, zero_points)


def refitted(before: Tensor, scales: Tensor) -> Tensor:
    """Scales as stored: FP16 and never zero; where the new one is unusable, the old one."""
    rounded = scales.half().float()
    usable = torch.isfinite(rounded) & (rounded.abs() >= NNCF_SMALLEST_SCALE)
    return torch.where(usable, rounded, before)


def _best(
    groups: Tensor,
    weigh: Tensor,
    plain: Levels,
    factors: Tensor = _FACTORS,
    shifts: tuple[float, ...] = (0.0,),
) -> Levels:
    """The best of `factors` × the plain scales, zero points moved by `shifts`; then rounded and refitted in turns.

    Groups are rows here: (groups, columns per group).
    """
    trial = try_scales_on_cpu if groups.device.type == "cpu" else try_scales
    tries = (
        constant(factors.repeat_interleave(len(shifts)), groups.device),
        constant(torch.tensor(shifts).repeat(len(factors)), groups.device),
    )
    scales, zero_points = trial(groups, weigh, plain, *tries)
    smallest = plain.scales.half().float().clamp_min(NNCF_SMALLEST_SCALE)
    best = plain.with_scales(refitted(smallest, scales), zero_points)
    return _refined(groups, weigh.repeat(len(groups) // len(weigh), 1), best)


def _refined(groups: Tensor, rows: Tensor, best: Levels) -> Levels:
    """Fitted to the codes and rounded again in turns, for as long as that helps; `rows` are the weights of groups."""
    codes, loss = _rounded(groups, rows, best)
    for _ in range(_REFITS):
        levels = _fitted(groups, rows, best, codes)
        new_codes, new_loss = _rounded(groups, rows, levels)
        better = new_loss < loss
        if not bool(better.any()):
            break
        best = _chosen(better, levels, best)
        codes = torch.where(better, new_codes, codes)
        loss = torch.where(better, new_loss, loss)
    return best


def _rounded(groups: Tensor, rows: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Codes and loss, (groups, 1)."""
    codes = levels.rounded(groups)
    return codes, (rows * (groups - levels.values(codes)).square()).sum(-1, keepdim=True)


def _chosen(better: Tensor, new: Levels, old: Levels) -> Levels:
    offsets = None
    if old.offsets is not None and new.offsets is not None:
        offsets = torch.where(better, new.offsets, old.offsets)
    return replace(
        old, scales=torch.where(better, new.scales, old.scales), offsets=offsets
    )


def _fitted(groups: Tensor, rows: Tensor, levels: Levels, codes: Tensor) -> Levels:
    """The levels with the scales, and biases if there are any, that suit these codes best."""
    factors = levels.places(codes)
    if levels.offsets is not None:
        total = rows.sum(-1, keepdim=True)
        mean = (rows * groups).sum(-1, keepdim=True) / total
        middle = (rows * factors).sum(-1, keepdim=True) / total
        groups = groups - mean
        factors = factors - middle
    product = (rows * groups * factors).sum(-1, keepdim=True)
    fit = product / (rows * factors.square()).sum(-1, keepdim=True)
    scales = refitted(levels.scales, fit)
    if levels.offsets is None:
        return replace(levels, scales=scales)
    return replace(levels, scales=scales, offsets=(mean - scales * middle).half().float())


def _best_affine(groups: Tensor, rows: Tensor, top: int) -> Levels:
    """Scales and biases: the best of grids that cover a group's middle more or less widely; then refined."""
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    span = (high - low).clamp_min(top * NNCF_SMALLEST_SCALE)

    def covering(factor: float) -> Levels:
        scales = (span * (factor / top)).half().float().clamp_min(NNCF_SMALLEST_SCALE)
        offsets = ((low + high - scales * top) / 2).half().float()
        levels = Levels(groups.shape[-1], scales, 0, top, offsets=offsets)
        return _fitted(groups, rows, levels, levels.rounded(groups))

    best = _least(groups, rows, map(covering, _FACTORS.tolist()))
    return _refined(groups, rows, best)


def _least(groups: Tensor, rows: Tensor, tries: Iterator[Levels]) -> Levels:
    """Of every group those with the least loss, the first of equals."""
    best = next(tries)
    least = _rounded(groups, rows, best)[1]
    for levels in tries:
        loss = _rounded(groups, rows, levels)[1]
        best = _chosen(loss < least, levels, best)
        least = torch.minimum(loss, least)
    return best


def _best_powers(groups: Tensor, rows: Tensor, fmt: MicroscalingFormat) -> Levels:
    """The best of the power of two that covers a group and the two below it; there is nothing to fit."""
    table = tuple(MX_LEVELS.tolist())
    covering = fmt.covering_scales(groups)
    plain = Levels(groups.shape[-1], covering, 0, len(table) - 1, table=table, fixed=True)
    tries = (plain.with_scales(covering * factor) for factor in (1, 0.5, 0.25))
    best = _least(groups, rows, tries)
    return plain.with_scales(best.scales.clamp_min(NNCF_SMALLEST_SCALE))


def try_scales(
    groups: Tensor,
    weigh: Tensor,
    plain: Levels,
    factors: Tensor,
    shifts: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The best fitted scale and zero point of every group, (groups, 1), over all tries."""
    rows = weigh.repeat(len(groups) // len(weigh), 1)
    scales = plain.scales
    points = plain.zero_points
    gain = torch.full_like(scales, -1.0)
    for factor, shift in zip(factors, shifts, strict=True):
        zeros = plain.zero_points
        if zeros is not None:
            zeros = (zeros + shift).clamp(plain.lowest, plain.highest)
        levels = plain.with_scales(plain.scales * factor, zeros)
        grid = levels.places(levels.rounded(groups))
        product = (rows * groups * grid).sum(-1, keepdim=True)
        square = (rows * grid.square()).sum(-1, keepdim=True)
        reached = torch.where(square > 0, product.square() / square, 0)
        better = reached > gain
        gain = torch.where(better, reached, gain)
        scales = torch.where(better, product / square, scales)
        if zeros is not None and points is not None:
            points = torch.where(better, zeros, points)
    return scales, points


def try_scales_on_cpu(
    groups: Tensor,
    weigh: Tensor,
    plain: Levels,
    factors: Tensor,
    shifts: Tensor,
) -> tuple[Tensor, Tensor | None]:
    scales = plain.scales.clone()
    points = scales.new_zeros(scales.shape)
    if plain.zero_points is not None:
        points = plain.zero_points.clone()
    _try_scales(
        groups.contiguous().numpy(),
        weigh.contiguous().numpy(),
        scales[:, 0].numpy(),
        points[:, 0].numpy(),
        factors.numpy(),
        shifts.numpy(),
        float32(plain.lowest),
        float32(plain.highest),
        np.array(plain.table or (0.0,), float32),
    )
    return scales, None if plain.zero_points is None else points


@njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
def _try_scales(groups, weigh, scales, points, factors, shifts, lowest, highest, table):  # type: ignore[no-untyped-def]
    count, width = groups.shape
    with_zero = lowest == 0 and table.shape[0] == 1
    for row in prange(count):
        values = groups[row]
        importance = weigh[row % weigh.shape[0]]
        plain = scales[row]
        first = points[row]
        if plain == 0:
            continue
        gain = float32(-1)
        for t in range(factors.shape[0]):
            inverse = float32(1) / (plain * factors[t])
            zero = float32(0)
            if with_zero:
                zero = min(max(first + shifts[t], lowest), highest)
            product = float32(0)
            square = float32(0)
            if table.shape[0] > 1:
                for j in range(width):
                    scaled = values[j] * inverse
                    level = table[0]
                    for i in range(table.shape[0] - 1):
                        if scaled > float32(0.5) * (table[i] + table[i + 1]):
                            level = table[i + 1]
                    product += importance[j] * values[j] * level
                    square += importance[j] * level * level
            else:
                for j in range(width):
                    # Adding and subtracting 1.5·2²³ would round faster, but fastmath would remove it.
                    code = float32(np.rint(values[j] * inverse)) + zero
                    level = min(max(code, lowest), highest) - zero
                    product += importance[j] * values[j] * level
                    square += importance[j] * level * level
            if square > 0 and product * product / square > gain:
                gain = product * product / square
                scales[row] = product / square
                points[row] = zero
