"""All metrics of a row of logits in one pass over it, on a GPU.

With p the teacher's probabilities, δ the difference of the logits and u = δ − c for any constant c of a row, four sums

    F = Σ p (eᵘ − 1 − u)     G = Σ p (u eᵘ − eᵘ + 1)     U = Σ p u     E = Σ δ²

give everything: x = U + F = Σ p (eᵘ − 1), the shift of the log-sum-exp is c + log(1 + x), and

    KL(teacher ‖ student) = F − (x − log(1 + x))
    KL(student ‖ teacher) = G/(1 + x) − (log(1 + x) − x/(1 + x))

F and G are of second order in u and summed as in `metric_kernel`: a series for small u, float32 within a tile and
double across tiles. What is taken off is of second order in x. c is δ at the teacher's top token, so that x is as small
as u is; then nothing cancels that counts. Rows where eᵘ overflows come out as NaN or infinity, for others to do again.

The sums need no log-sum-exp of the student, so they could be the end of the product with the head, and its logits never
be in memory. Tried (docs/performance.md): that kernel runs out of registers and is slower than product and pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kl_lens.checkpoints.kernels.triton_products import product, split

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
def _from_logits(  # type: ignore[no-untyped-def]
    teacher, student, lse, top, target, out, columns, teacher_stride, student_stride, BLOCK: tl.constexpr,
):  # fmt: skip
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
            torch.where(
                x.abs() < 1, forward - (x - log), log - linear
            ),  # far apart, F and x are huge and alike
            backward / (1 + x) - (log - x / (1 + x)),
            error,
            torch.where(targets >= 0, shift.double() + log - at_target, 0.0),
            (at_top >= largest).double(),
        ),
        1,
    )


class StateMetrics:
    """A head (vocabulary, width), split once; students' states are compared behind it, some rows at a time."""

    def __init__(self, head: torch.Tensor, bias: torch.Tensor | None, factor: float, precision: str) -> None:
        self._head, self._bias, self._factor, self._precision = head, bias, factor, precision
        self._halves = split(head, precision)

    def compare(
        self, states: torch.Tensor, teacher: torch.Tensor, lse: torch.Tensor, top: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """Of students' states (rows, width) and the teacher's logits: (rows, 5) in double, on the device."""
        student = product(split(states, self._precision), self._halves, self._bias)
        if self._factor != 1.0:
            student *= self._factor
        return compare_logits(teacher, lse, top, targets, student)


def compare_logits(
    teacher: torch.Tensor, lse: torch.Tensor, top: torch.Tensor, targets: torch.Tensor, student: torch.Tensor
) -> torch.Tensor:
    """The same of logits (rows, vocabulary) that are there already."""
    rows, vocabulary = teacher.shape
    out = torch.empty(_SUMS, rows, dtype=torch.float64, device=teacher.device)
    grid: Any = (rows,)
    _from_logits[grid](
        teacher, student, lse.float(), top, targets, out, vocabulary, teacher.stride(0), student.stride(0),
        BLOCK=2048, num_warps=4,
    )  # fmt: skip
    shift = (student.gather(1, top[:, None]) - teacher.gather(1, top[:, None]))[:, 0]
    return _finished(out, shift, targets)
