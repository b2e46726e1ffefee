"""All metrics of a row of logits in one pass over it, on a GPU.

With p the teacher's probabilities, δ the difference of the logits and u = δ − c for any constant c of a row, four sums

    F = Σ p (eᵘ − 1 − u)     G = Σ p (u eᵘ − eᵘ + 1)     U = Σ p u     E = Σ δ²

give everything: x = U + F = Σ p (eᵘ − 1), the shift of the log-sum-exp is c + log(1 + x), and

    KL(teacher ‖ student) = F − (x − log(1 + x))
    KL(student ‖ teacher) = G/(1 + x) − (log(1 + x) − x/(1 + x))

F and G are of second order in u and summed as in `metrics`: a series for small u, float32 within a few tiles and
double across them. The subtracted terms are of second order in x. c is δ at the teacher's top token, which makes x as
small as u, so no precision is lost. Rows where eᵘ overflows come out as NaN or infinity; `metrics.mended` redoes them.

Where student and teacher share the head, δ is the head times the difference of its inputs. Rounding errors are then
relative to δ, not to logits a thousand times as large. Half precision is enough (random errors of 2⁻¹¹ δ, which change
a mean KL by about their square), and one product replaces the three that float32's accuracy takes.

The sums need no log-sum-exp of the student, so they could be fused into the product with the head, without logits in
memory. Tried (docs/performance.md): that kernel runs out of registers and is slower than two separate ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kl_lens.model.kernels.triton_products import product, split

_SUMS = 7  # F, G, U, E, δ at the target, the student's logit at the teacher's top token, its largest logit


@triton.jit
def _terms(t, difference, lse, c, inside):  # type: ignore[no-untyped-def]
    """Per column: its shares of F, G and U. t: the teacher's logits."""
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
    return forward, backward, p * u


@triton.jit
def _from_logits(  # type: ignore[no-untyped-def]
    teacher,
    student,
    lse,
    top,
    target,
    out,
    columns,
    teacher_stride,
    student_stride,
    MOVED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """out: (_SUMS, rows), float64; one program per row. MOVED: `student` holds δ."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    t_row = teacher + row * teacher_stride
    s_row = student + row * student_stride
    best = tl.load(top + row)
    wanted = tl.load(target + row)
    at_top = tl.load(s_row + best)
    if MOVED:
        shift = at_top
        at_top += tl.load(t_row + best)
    else:
        shift = at_top - tl.load(t_row + best)
    row_lse = tl.load(lse + row)
    forward = tl.zeros((), tl.float64)
    backward = tl.zeros((), tl.float64)
    linear = tl.zeros((), tl.float64)
    error = tl.zeros((), tl.float64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK * SPAN):
        # Threads synchronise for the sum once per SPAN tiles, not once per tile.
        f = tl.zeros((BLOCK,), tl.float32)
        g = tl.zeros((BLOCK,), tl.float32)
        u = tl.zeros((BLOCK,), tl.float32)
        e = tl.zeros((BLOCK,), tl.float32)
        for first in range(start, tl.minimum(start + BLOCK * SPAN, columns), BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < columns
            t = tl.load(t_row + column, mask=inside, other=0.0)
            s = tl.load(s_row + column, mask=inside, other=0.0)
            difference = s if MOVED else s - t
            largest = tl.maximum(
                largest, tl.where(inside, t + difference if MOVED else s, float("-inf"))
            )
            more_f, more_g, more_u = _terms(t, difference, row_lse, shift, inside)
            f += more_f
            g += more_g
            u += more_u
            e += difference * difference
        forward += tl.sum(f, 0).to(tl.float64)
        backward += tl.sum(g, 0).to(tl.float64)
        linear += tl.sum(u, 0).to(tl.float64)
        error += tl.sum(e, 0).to(tl.float64)
    at_target = tl.maximum(wanted, 0)
    moved = tl.load(s_row + at_target)
    if not MOVED:
        moved -= tl.load(t_row + at_target)
    tl.store(out + row, forward)
    tl.store(out + rows + row, backward)
    tl.store(out + 2 * rows + row, linear)
    tl.store(out + 3 * rows + row, error)
    tl.store(out + 4 * rows + row, moved.to(tl.float64))
    tl.store(out + 5 * rows + row, at_top.to(tl.float64))
    tl.store(out + 6 * rows + row, tl.maximum(tl.max(largest, 0), at_top).to(tl.float64))


def _finished(sums: Tensor, shift: Tensor, targets: Tensor) -> Tensor:
    """(rows, 5), as in `metrics.compare`, from (_SUMS, rows) in double."""
    forward, backward, linear, error, at_target, at_top, largest = sums
    x = linear + forward
    log = torch.log1p(x)
    return torch.stack(
        (
            # Far from the teacher, F and x are huge and nearly equal.
            torch.where(x.abs() < 1, forward - (x - log), log - linear),
            backward / (1 + x) - (log - x / (1 + x)),
            error,
            torch.where(targets >= 0, shift.double() + log - at_target, 0.0),
            (at_top >= largest).double(),
        ),
        1,
    )


class SharedHead:
    """A head (vocabulary, width) that students share with the teacher, split once."""

    def __init__(self, head: Tensor, factor: float) -> None:
        self._halves = split(head, "tf32")
        self._factor = factor

    def moved(self, states: Tensor, original: Tensor) -> Tensor:
        """By how much logits (rows, vocabulary) differ, from both models' states (rows, width)."""
        moved = product(split(states - original, "tf32"), self._halves)
        if self._factor != 1.0:
            moved *= self._factor
        return moved


def compare_logits(teacher: Any, student: Tensor, *, moved: bool = False) -> Tensor:
    """(rows, 5) in double on the device, from a `metrics.TeacherRows` and logits (rows, vocabulary); `moved`: these are
    differences from the teacher's."""
    logits = teacher.logits
    top = teacher.top
    rows, vocabulary = logits.shape
    out = torch.empty(_SUMS, rows, dtype=torch.float64, device=logits.device)
    grid: Any = (rows,)
    _from_logits[grid](
        logits,
        student,
        teacher.lse.float(),
        top,
        teacher.targets,
        out,
        vocabulary,
        logits.stride(0),
        student.stride(0),
        MOVED=moved,
        BLOCK=1024,
        SPAN=16,
        num_warps=8,
    )
    shift = student.gather(1, top[:, None])[:, 0]
    if not moved:
        shift = shift - logits.gather(1, top[:, None])[:, 0]
    return _finished(out, shift, teacher.targets)
