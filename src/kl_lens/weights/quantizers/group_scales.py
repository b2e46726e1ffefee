"""The scales (and zero points, or biases) with the least loss for OpenVINO's and MLX's grids, columns weighted by
importance.

For every group, scales are tried around the smallest that covers it, with both signs where the integer range is
asymmetric. Given the integers q (less the zero point), the best scale is s = Σ h w q / Σ h q² and its loss
Σ h w² − s Σ h w q, so a try costs one pass. Then the group is rounded with the stored scale and fitted again, for as
long as that helps. With a free bias the same holds for w and q less their weighted means.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

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


def searched_levels(
    weight: torch.Tensor, fmt: Format, importance: torch.Tensor
) -> Levels:
    """Levels of a weight (rows, columns) in a grouped format; importance (columns,), positive."""
    group = fmt.group_size or weight.shape[-1]
    groups = weight.reshape(-1, group)
    weigh = importance.reshape(-1, group)
    low, high = torch.aminmax(groups, dim=-1)
    largest = torch.maximum(-low, high)
    zeros = torch.zeros_like(low)
    if isinstance(fmt, SignedScaleFormat):
        top = 2 ** (fmt.bits - 1)
        factors = torch.cat([_FACTORS, -_FACTORS])
        plain = Levels(group, largest[:, None] / top, -top, top - 1)
        best = _best(groups, weigh, plain, zeros, factors, torch.zeros_like(factors))
    elif isinstance(fmt, ZeroPointFormat):
        top = 2**fmt.bits - 1
        low = low.clamp(max=0)
        high = high.clamp(min=0)
        span = (high - low).clamp_min(NNCF_SMALLEST_SCALE)
        shifts = torch.tensor([-1.0, 0.0, 1.0]).repeat(len(_FACTORS))
        plain = Levels(group, span[:, None] / top, 0, top)
        best = _best(
            groups,
            weigh,
            plain,
            (-low * top / span).round(),
            _FACTORS.repeat_interleave(3),
            shifts,
        )
    elif isinstance(fmt, AffineFormat):
        best = _best_affine(
            groups, weigh.repeat(len(groups) // len(weigh), 1), 2**fmt.bits - 1
        )
    elif isinstance(fmt, MicroscalingFormat):
        best = _best_powers(groups, weigh.repeat(len(groups) // len(weigh), 1), fmt)
    else:
        assert isinstance(fmt, NormalFloatFormat)
        plain = Levels(
            group,
            largest[:, None],
            0,
            len(NF_LEVELS) - 1,
            table=tuple(NF_LEVELS.tolist()),
        )
        best = _best(groups, weigh, plain, zeros, _FACTORS, torch.zeros_like(_FACTORS))

    def by_row(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.view(weight.shape[0], -1)

    scales = best.scales.view(weight.shape[0], -1)
    return replace(
        best,
        scales=scales,
        zero_points=by_row(best.zero_points),
        offsets=by_row(best.offsets),
    )


def stored(fmt: Format, levels: Levels, codes: torch.Tensor) -> Quantized:
    """These codes as an artifact stores them."""
    assert isinstance(fmt, GroupedFormat)
    unsigned = levels.lowest == 0
    zero_points = (
        None if levels.zero_points is None else levels.zero_points.to(torch.uint8)
    )
    return Quantized(
        fmt.name,
        tuple(codes.shape),
        codes.to(torch.uint8 if unsigned else torch.int8),
        fmt.stored_scales(levels.scales),
        zero_points if levels.offsets is None else levels.offsets.half(),
    )


def refitted(before: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Scales as stored: FP16 and never zero; where the new one is unusable, the old one."""
    kept = scales.half().float()
    usable = torch.isfinite(kept) & (kept.abs() >= NNCF_SMALLEST_SCALE)
    return torch.where(usable, kept, before)


def _best(
    groups: torch.Tensor,
    weigh: torch.Tensor,
    plain: Levels,
    zeros: torch.Tensor,
    factors: torch.Tensor,
    shifts: torch.Tensor,
) -> Levels:
    """The best of `factors` × the plain scales, zero points moved by `shifts`; then rounded and refitted in turns.

    Groups are rows here: (groups, columns per group).
    """
    trial = try_scales_on_cpu if groups.device.type == "cpu" else try_scales
    scales, zero_points = trial(
        groups,
        weigh,
        plain,
        zeros,
        constant(factors, groups.device),
        constant(shifts, groups.device),
    )
    asymmetric = bool((shifts != 0).any())
    smallest = plain.scales.half().float().clamp_min(NNCF_SMALLEST_SCALE)
    best = plain.with_scales(
        refitted(smallest, scales[:, None]), zero_points[:, None] if asymmetric else None
    )
    return _refined(groups, weigh.repeat(len(groups) // len(weigh), 1), best)


def _refined(groups: torch.Tensor, rows: torch.Tensor, best: Levels) -> Levels:
    """Fitted to the codes and rounded again in turns, for as long as that helps; `rows` are the weights of groups."""
    codes, loss = _rounded(groups, rows, best)
    for _ in range(_REFITS):
        other = _fitted(groups, rows, best, codes)
        new_codes, new_loss = _rounded(groups, rows, other)
        better = new_loss < loss
        if not bool(better.any()):
            break
        best = _chosen(better, other, best)
        codes = torch.where(better, new_codes, codes)
        loss = torch.where(better, new_loss, loss)
    return best


def _rounded(
    groups: torch.Tensor, rows: torch.Tensor, levels: Levels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and loss, (groups, 1)."""
    codes = levels.rounded(groups)
    return codes, (rows * (groups - levels.values(codes)).square()).sum(-1, keepdim=True)


def _chosen(which: torch.Tensor, yes: Levels, no: Levels) -> Levels:
    offsets = no.offsets
    if offsets is not None and yes.offsets is not None:
        offsets = torch.where(which, yes.offsets, offsets)
    return replace(no, scales=torch.where(which, yes.scales, no.scales), offsets=offsets)


def _fitted(
    groups: torch.Tensor, rows: torch.Tensor, levels: Levels, codes: torch.Tensor
) -> Levels:
    """The levels with the scales, and biases if there are any, that suit these codes best."""
    places = levels.places(codes)
    if levels.offsets is None:
        fit = (rows * groups * places).sum(-1, keepdim=True) / (
            rows * places.square()
        ).sum(-1, keepdim=True)
        return levels.with_scales(refitted(levels.scales, fit), levels.zero_points)
    total = rows.sum(-1, keepdim=True)
    mean, middle = (
        (rows * part).sum(-1, keepdim=True) / total for part in (groups, places)
    )
    places = places - middle
    fit = (rows * (groups - mean) * places).sum(-1, keepdim=True) / (
        rows * places.square()
    ).sum(-1, keepdim=True)
    scales = refitted(levels.scales, fit)
    return replace(levels, scales=scales, offsets=(mean - scales * middle).half().float())


def _best_affine(groups: torch.Tensor, rows: torch.Tensor, top: int) -> Levels:
    """Scales and biases: the best of grids that cover a group's middle more or less widely; then refined."""
    low, high = (edge[:, None] for edge in torch.aminmax(groups, dim=-1))
    span = (high - low).clamp_min(top * NNCF_SMALLEST_SCALE)
    best: Levels | None = None
    for factor in _FACTORS.tolist():
        scales = (span * (factor / top)).half().float().clamp_min(NNCF_SMALLEST_SCALE)
        offsets = ((low + high - scales * top) / 2).half().float()
        tried = Levels(groups.shape[-1], scales, 0, top, offsets=offsets)
        tried = _fitted(groups, rows, tried, tried.rounded(groups))
        loss = _rounded(groups, rows, tried)[1]
        if best is None:
            best = tried
            least = loss
            continue
        better = loss < least
        best = _chosen(better, tried, best)
        least = torch.where(better, loss, least)
    assert best is not None
    return _refined(groups, rows, best)


def _best_powers(
    groups: torch.Tensor, rows: torch.Tensor, fmt: MicroscalingFormat
) -> Levels:
    """The best of the power of two that covers a group and the two below it; there is nothing to fit."""
    table = tuple(MX_LEVELS.tolist())
    covering = fmt.covering_scales(groups)
    tried = [covering * factor for factor in (1, 0.5, 0.25)]
    plain = Levels(groups.shape[-1], covering, 0, len(table) - 1, table=table, fixed=True)
    losses = [
        _rounded(groups, rows, plain.with_scales(scales))[1][:, 0] for scales in tried
    ]
    best = torch.stack(losses).argmin(0)
    scales = torch.stack(tried)[best, torch.arange(len(best), device=best.device)]
    return plain.with_scales(scales.clamp_min(NNCF_SMALLEST_SCALE))


def try_scales(
    groups: torch.Tensor,
    weigh: torch.Tensor,
    plain: Levels,
    zeros: torch.Tensor,
    factors: torch.Tensor,
    shifts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best fitted scale and zero point of every group, over all tries."""
    rows = weigh.repeat(len(groups) // len(weigh), 1)
    gain = torch.full_like(zeros, -1.0)
    scales = plain.scales[:, 0].clone()
    points = zeros.clone()
    for factor, shift in zip(factors, shifts, strict=True):
        zero = (zeros + shift).clamp(plain.lowest, plain.highest)
        level = plain.with_scales(
            plain.scales * factor, zero[:, None] if plain.lowest == 0 else None
        )
        places = level.places(level.rounded(groups))
        product = (rows * groups * places).sum(-1)
        square = (rows * places.square()).sum(-1)
        reached = torch.where(square > 0, product.square() / square, 0)
        better = reached > gain
        gain = torch.where(better, reached, gain)
        scales = torch.where(better, product / square, scales)
        points = torch.where(better, zero, points)
    return scales, points


def try_scales_on_cpu(
    groups: torch.Tensor,
    weigh: torch.Tensor,
    plain: Levels,
    zeros: torch.Tensor,
    factors: torch.Tensor,
    shifts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = plain.scales[:, 0].clone()
    points = zeros.clone()
    table = np.array(plain.table or (0.0,), np.float32)
    _try_scales(
        groups.contiguous().numpy(),
        weigh.contiguous().numpy(),
        scales.numpy(),
        points.numpy(),
        factors.numpy(),
        shifts.numpy(),
        np.float32(plain.lowest),
        np.float32(plain.highest),
        table,
    )
    return scales, points


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
        gain = np.float32(-1)
        for t in range(factors.shape[0]):
            inverse = np.float32(1) / (plain * factors[t])
            zero = (
                min(max(first + shifts[t], lowest), highest)
                if with_zero
                else np.float32(0)
            )
            product = np.float32(0)
            square = np.float32(0)
            if table.shape[0] > 1:
                for j in range(width):
                    scaled = values[j] * inverse
                    place = table[0]
                    for i in range(table.shape[0] - 1):
                        if scaled > np.float32(0.5) * (table[i] + table[i + 1]):
                            place = table[i + 1]
                    product += importance[j] * values[j] * place
                    square += importance[j] * place * place
            else:
                for j in range(width):
                    # Adding and subtracting 1.5·2²³ would round faster, but fastmath would remove it.
                    place = (
                        min(
                            max(np.float32(np.rint(values[j] * inverse)) + zero, lowest),
                            highest,
                        )
                        - zero
                    )
                    product += importance[j] * values[j] * place
                    square += importance[j] * place * place
            if square > 0 and product * product / square > gain:
                gain = product * product / square
                scales[row] = product / square
                points[row] = zero
