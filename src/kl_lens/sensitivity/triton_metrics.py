"""All metrics of perturbed states in one pass on a GPU: product with the head and sums over the vocabulary in one kernel,
so that a student's logits are never in memory.

With p the teacher's probabilities, δ the difference of the logits and u = δ − c for any constant c of a row, four sums

    F = Σ p (eᵘ − 1 − u)     G = Σ p (u eᵘ − eᵘ + 1)     U = Σ p u     E = Σ δ²

give everything: x = U + F = Σ p (eᵘ − 1), the shift of the log-sum-exp is c + log(1 + x), and

    KL(teacher ‖ student) = F − (x − log(1 + x))
    KL(student ‖ teacher) = G/(1 + x) − (log(1 + x) − x/(1 + x))

F and G are of second order in u and summed as in `metric_kernel`: a series for small u, float32 within a tile and double
across tiles. What is taken off is of second order in x. c is δ at the teacher's top token, so that x is as small
as u is; then nothing cancels that counts. Rows where eᵘ overflows come out as NaN or infinity, for others to do again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kl_lens.checkpoints.kernels.triton_products import place_of, split, tile_product, tiles

_SUMS = 7  # F, G, U, E, δ at the target, the student's logit at the teacher's top token, its largest logit


@triton.jit
def _terms(t, s, lse, c, inside):  # type: ignore[no-untyped-def]
    """Per column: its shares of F, G, U and E. t, s: logits of teacher and student."""
    difference = tl.where(inside, s - t, 0.0)
    log_p = t - lse
    p = tl.where(inside, tl.exp(log_p), 0.0)
    u = tl.where(inside, difference - c, 0.0)
    square = u * u
    low = 1 / 2 + u * (1 / 6)
    middle = 1 / 24 + u * (1 / 120)
    high = 1 / 720 + u * (1 / 5040)
    small = p * square * (low + square * (middle + square * high))
    q = tl.where(inside, tl.exp(log_p + u), 0.0)
    is_small = square < 0.25
    forward = tl.where(is_small, small, q - p - p * u)
    backward = tl.where(is_small, u * (p * u + small) - small, q * u - q + p)
    return forward, backward, p * u, difference * difference, difference


@triton.jit
def _from_states(a, a_low, a_scale, b, b_low, b_scale, bias, factor, teacher, lse, shift, top, target, out, rows, columns, depth, stride, BIAS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """out: (_SUMS, tiles of columns, rows), float32."""
    column_tiles = tl.cdiv(columns, BN)
    m, n = place_of(tl.program_id(0), tl.cdiv(rows, BM), column_tiles, GROUP)
    row, column = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    r, c = tl.minimum(row, rows - 1), tl.minimum(column, columns - 1)
    s = tile_product(a, a_low, b, b_low, r, c, depth, PARTS, BM, BN, BK)
    s = s * tl.load(a_scale + r)[:, None] * tl.load(b_scale + c)[None, :]
    if BIAS:
        s += tl.load(bias + c)[None, :]
    s = s * factor
    inside = (column < columns)[None, :]
    t = tl.load(teacher + r.to(tl.int64)[:, None] * stride + c[None, :])
    forward, backward, linear, error, difference = _terms(
        t, s, tl.load(lse + r)[:, None], tl.load(shift + r)[:, None], inside
    )
    place = out + n.to(tl.int64) * rows + row
    step = column_tiles.to(tl.int64) * rows
    valid = row < rows
    tl.store(place, tl.sum(forward, 1), mask=valid)
    tl.store(place + step, tl.sum(backward, 1), mask=valid)
    tl.store(place + 2 * step, tl.sum(linear, 1), mask=valid)
    tl.store(place + 3 * step, tl.sum(error, 1), mask=valid)
    wanted = column[None, :] == tl.load(target + r)[:, None]
    tl.store(place + 4 * step, tl.sum(tl.where(wanted, difference, 0.0), 1), mask=valid)
    wanted = column[None, :] == tl.load(top + r)[:, None]
    tl.store(place + 5 * step, tl.sum(tl.where(wanted, s, 0.0), 1), mask=valid)
    tl.store(place + 6 * step, tl.max(tl.where(inside, s, float("-inf")), 1), mask=valid)


@triton.jit
def _from_logits(teacher, student, lse, top, target, out, columns, teacher_stride, student_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """out: (_SUMS, rows), float64; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    t_row, s_row = teacher + row * teacher_stride, student + row * student_stride
    best, wanted = tl.load(top + row), tl.load(target + row)
    at_top = tl.load(s_row + best)
    shift = at_top - tl.load(t_row + best)
    row_lse = tl.load(lse + row)
    forward = tl.zeros((), tl.float64)
    backward = tl.zeros((), tl.float64)
    linear = tl.zeros((), tl.float64)
    error = tl.zeros((), tl.float64)
    largest = at_top
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        t = tl.load(t_row + column, mask=inside, other=0.0)
        s = tl.load(s_row + column, mask=inside, other=0.0)
        f, g, u, e, _ = _terms(t, s, row_lse, shift, inside)
        forward += tl.sum(f, 0).to(tl.float64)
        backward += tl.sum(g, 0).to(tl.float64)
        linear += tl.sum(u, 0).to(tl.float64)
        error += tl.sum(e, 0).to(tl.float64)
        largest = tl.maximum(largest, tl.max(tl.where(inside, s, float("-inf")), 0))
    at_target = tl.maximum(wanted, 0)
    moved = tl.load(s_row + at_target) - tl.load(t_row + at_target)
    tl.store(out + row, forward)
    tl.store(out + rows + row, backward)
    tl.store(out + 2 * rows + row, linear)
    tl.store(out + 3 * rows + row, error)
    tl.store(out + 4 * rows + row, moved.to(tl.float64))
    tl.store(out + 5 * rows + row, at_top.to(tl.float64))
    tl.store(out + 6 * rows + row, largest.to(tl.float64))


def _finished(sums: torch.Tensor, shift: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(rows, 5), as `metrics.compare` has them, from (_SUMS, rows) in double."""
    forward, backward, linear, error, at_target, at_top, largest = sums
    x = linear + forward
    log = torch.log1p(x)
    return torch.stack(
        (
            forward - (x - log),
            backward / (1 + x) - (log - x / (1 + x)),
            error,
            torch.where(targets >= 0, shift.double() + log - at_target, 0.0),
            (at_top >= largest).double(),
        ),
        1,
    )


def compare_states(
    states: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    factor: float,
    teacher: torch.Tensor,
    lse: torch.Tensor,
    top: torch.Tensor,
    targets: torch.Tensor,
    precision: str,
) -> torch.Tensor:
    """Of students' states (rows, width) with a head (vocabulary, width): (rows, 5) in double, on the device."""
    rows, vocabulary = teacher.shape
    logits_at_top = (states * head[top]).sum(-1)
    if bias is not None:
        logits_at_top += bias[top]
    shift = logits_at_top * factor - teacher.gather(1, top[:, None])[:, 0]
    a, b = split(states, precision), split(head, precision)
    sizes = tiles(states.device, a.parts)
    column_tiles = triton.cdiv(vocabulary, sizes["BN"])
    out = torch.empty(_SUMS, column_tiles, rows, dtype=torch.float32, device=states.device)
    grid: Any = (triton.cdiv(rows, sizes["BM"]) * column_tiles,)
    _from_states[grid](
        a.high, a.low, a.inverses, b.high, b.low, b.inverses, b.inverses if bias is None else bias, factor,
        teacher, lse.float(), shift, top, targets, out, rows, vocabulary, a.high.shape[1], teacher.stride(0),
        BIAS=bias is not None, PARTS=a.parts, **sizes,
    )  # fmt: skip
    sums = torch.cat([out[:-1].sum(1, dtype=torch.float64), out[-1:].amax(1).double()])
    return _finished(sums, shift, targets)


def compare_logits(
    teacher: torch.Tensor, lse: torch.Tensor, top: torch.Tensor, targets: torch.Tensor, student: torch.Tensor
) -> torch.Tensor:
    """The same of logits (rows, vocabulary) that are there already."""
    rows, vocabulary = teacher.shape
    out = torch.empty(_SUMS, rows, dtype=torch.float64, device=teacher.device)
    grid: Any = (rows,)
    _from_logits[grid](
        teacher, student, lse.float(), top, targets, out, vocabulary, teacher.stride(0), student.stride(0),
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    shift = (student.gather(1, top[:, None]) - teacher.gather(1, top[:, None]))[:, 0]
    return _finished(out, shift, targets)
