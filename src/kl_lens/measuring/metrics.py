"""How a perturbed model's output distributions differ from the original's, token by token.

Everything is computed from one chunk of rows at a time, so memory never grows with tokens × vocabulary. On CPU the
row kernel at the end does the work, on a GPU those of `triton_metrics`; elsewhere, and as the reference, plain torch.

The two divergences are formed from d = log p_student - log p_teacher so that nothing cancels:

    KL(teacher ‖ student) = Σ p (e^d - 1 - d)            because Σ p (e^d - 1) = 0
    KL(student ‖ teacher) = Σ p (d e^d - e^d + 1)

Each term is ≥ 0 and of second order in d: a series for small d; for large d, p e^d is taken as q, the student's own
probability, which cannot overflow. The textbook form Σ p (log p - log q) subtracts numbers of order one and loses
everything below 1e-7 in float32; this one is good to about 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from numpy import float32, float64, int32
from torch import Tensor

from kl_lens.base.accelerators import runs_triton
from kl_lens.base.compiling import njit, prange
from kl_lens.base.errors import RunError
from kl_lens.measuring.objectives import OBJECTIVES
from kl_lens.model.kernels import Comparison
from kl_lens.model.kernels.vector_math import (
    FAST_MATH,
    LANES,
    LOG2_E,
    exp2_decay,
    float_bits,
    from_bits,
    largest,
)
from kl_lens.model.tasks import UNCOUNTED
from kl_lens.run.readings import KL, Reading, packed

Floats = npt.NDArray[float64]  # (rows, columns), or one value per row or window


@dataclass(frozen=True)
class TeacherRows:
    """The original model's side of some rows."""

    logits: Tensor  # (rows, vocabulary), float32
    lse: Tensor  # (rows,), float64
    top: Tensor  # (rows,), int64
    targets: Tensor  # (rows,), int64: the true next token, -1 where there is none

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, *, kernel: bool | None = None) -> Self:
        """`kernel`: whether to use ours; None: if it is right."""
        logits = logits.float()
        if logits.device.type == "cpu" and (
            kernels_hold(logits.device) if kernel is None else kernel
        ):
            rows = logits.contiguous().numpy()
            sums = np.empty(len(rows), float64)
            _log_sum_exps(rows, sums)
            lse = torch.from_numpy(sums)
            top = torch.from_numpy(rows.argmax(-1))  # ten times as fast as torch's
        else:
            lse = torch.logsumexp(logits.double(), -1)
            top = logits.argmax(-1)
        return cls(logits, lse, top, targets)

    def some(self, rows: Tensor | slice) -> Self:
        """A few of the rows, by index."""
        at = rows if isinstance(rows, slice) else rows.to(self.lse.device)
        return type(self)(self.logits[at], self.lse[at], self.top[at], self.targets[at])

    @property
    def signal(self) -> Floats:
        """Σ squared logits of each row."""
        return self.logits.square().sum(-1, dtype=torch.float64).cpu().numpy()

    @property
    def cross_entropy(self) -> Tensor:
        """Per row, in nats; 0 where there is no target."""
        has_target = self.targets >= 0
        at_target = self.logits.gather(1, self.targets.clamp(min=0)[:, None])[
            :, 0
        ].double()
        return torch.where(has_target, self.lse - at_target, 0.0)


# The columns that kernels compute; those of other objectives follow.
BUILT_IN = (
    KL,
    "kl_student_to_teacher",
    "squared_error",
    "delta_cross_entropy",
    "same_top",
)
KL_TEACHER_STUDENT, KL_STUDENT_TEACHER, SQUARED_ERROR, DELTA_CROSS_ENTROPY, SAME_TOP = (
    range(len(BUILT_IN))
)


def compare(teacher: TeacherRows, student: Tensor, *, kernel: bool = True) -> Floats:
    """(rows, columns): both divergences, Σ squared error, change in cross-entropy, same top token, and a column for
    each of `OBJECTIVES`."""
    student = student.float()
    by_kernel = kernel and kernels_hold(student.device)
    rows = (_compare_by_kernel if by_kernel else _compare_reference)(teacher, student)
    others = [values.cpu().numpy() for values in objectives(teacher, student)]
    return np.column_stack([rows, *others])


def objectives(teacher: TeacherRows, student: Tensor) -> list[Tensor]:
    """(rows,) in double on the device for each of `OBJECTIVES`."""
    return [
        objective.rows(teacher.logits, student, teacher.targets).double()
        for objective in OBJECTIVES.values()
    ]


def _compare_by_kernel(teacher: TeacherRows, student: Tensor) -> Floats:
    if student.device.type == "cpu":
        out = np.empty((len(student), len(BUILT_IN)), float64)
        _compare(
            teacher.logits.contiguous().numpy(),
            teacher.lse.numpy(),
            teacher.top.numpy(),
            student.contiguous().numpy(),
            teacher.targets.numpy(),
            out,
        )
        return out
    from kl_lens.measuring.triton_metrics import compare_logits

    rows = compare_logits(teacher, student).cpu().numpy()
    return mended(rows, lambda bad: (teacher.some(bad), student[bad]))


def kernels_hold(device: torch.device) -> bool:
    """Whether there are kernels for this device, and they are right."""
    if device.type != "cpu" and not runs_triton(device):
        return False
    return all(comparison.holds for comparison in compared_metrics(device.type))


# Largest mean error of a row's metrics, relative to each; sound kernels are off by 1e-6. With a shared head, the
# difference of the logits comes from a product of halves.
_ROUNDING = 3e-5
_ROUNDING_OF_HALVES = 5e-4


@cache
def compared_metrics(device: str) -> list[Comparison]:
    """The kernels that compare logits beside plain torch in double precision, on random rows."""
    generator = torch.Generator().manual_seed(0)
    states, moves = torch.randn(2, 60, 64, generator=generator)
    head = (
        torch.randn(2500, 64, generator=generator) / 4
    )  # three tiles, the last one not full
    moved = states + moves * torch.logspace(-2, 0, 60)[:, None]
    states, moved, head = (tensor.to(device) for tensor in (states, moved, head))
    targets = torch.arange(60, device=device)
    student = moved @ head.T
    logits = states @ head.T
    teacher, plain = (
        TeacherRows.of(logits, targets, kernel=kernel) for kernel in (True, False)
    )
    exact = _compare_reference(replace(plain, logits=logits.double()), student.double())[
        :, :4
    ]
    sizes = np.abs(exact)
    sizes[:, DELTA_CROSS_ENTROPY] = sizes[
        :, DELTA_CROSS_ENTROPY
    ].mean()  # those of single rows may be zero

    def error(rows: Floats) -> float:
        return float((np.abs(rows[:, :4] - exact) / sizes).mean(0).max())

    comparisons = [
        Comparison("KL", error(_compare_by_kernel(teacher, student)), _ROUNDING)
    ]
    if device != "cpu":
        from kl_lens.measuring.triton_metrics import SharedHead, compare_logits

        rows = compare_logits(teacher, student - teacher.logits, moved=True).cpu().numpy()
        comparisons.append(Comparison("KL from differences", error(rows), _ROUNDING))
        differences = SharedHead(head, 1.0).moved(moved, states)
        rows = compare_logits(teacher, differences, moved=True).cpu().numpy()
        comparisons.append(
            Comparison("KL behind a shared head", error(rows), _ROUNDING_OF_HALVES)
        )
    return comparisons


def mended(rows: Floats, again: Callable[[Tensor], tuple[TeacherRows, Tensor]]) -> Floats:
    """The rows from a GPU's kernels; those that are NaN or infinite are computed again in plain torch.

    The kernels overflow where a student is certain of a token that the teacher thinks impossible. `again` gives the
    logits of both models for some rows.
    """
    built_in = rows[:, : len(BUILT_IN)]
    wrong = torch.from_numpy(np.flatnonzero(~np.isfinite(built_in).all(1)))
    for bad in wrong.split(256) if len(wrong) else ():
        built_in[bad.numpy()] = _compare_reference(*again(bad))
    return rows


def _compare_reference(teacher: TeacherRows, student: Tensor) -> Floats:
    """The same in plain torch with double sums."""
    lse = torch.logsumexp(student.double(), -1)
    exactness = student.dtype
    log_p = teacher.logits - teacher.lse.to(exactness)[:, None]
    d = (student - teacher.logits) - (lse - teacher.lse).to(exactness)[:, None]
    p = log_p.exp()
    q = (student - lse.to(exactness)[:, None]).exp()
    # q - p - p·d loses precision for small d; there the first terms of the series are exact.
    small = d.abs() < 0.1
    square = p * d * d
    forward = torch.where(
        small, square * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120))), q - p - p * d
    )
    backward = torch.where(
        small, square * (1 / 2 + d * (1 / 3 + d * (1 / 8 + d / 30))), q * d - q + p
    )
    has_target = teacher.targets >= 0
    at_target = teacher.targets.clamp(min=0)[:, None]
    teacher_there = teacher.logits.gather(1, at_target)[:, 0].double() - teacher.lse
    student_there = student.gather(1, at_target)[:, 0].double() - lse
    columns = (
        forward.sum(-1, dtype=torch.float64),
        backward.sum(-1, dtype=torch.float64),
        (student - teacher.logits).square().sum(-1, dtype=torch.float64),
        torch.where(has_target, teacher_there - student_there, 0.0),
        (student.gather(1, teacher.top[:, None])[:, 0] >= student.amax(-1)).double(),
    )
    return torch.stack(columns, 1).cpu().numpy()


def window_metrics(
    windows: Sequence[int],
    rows: Floats,
    signal: Floats,
    targets: Tensor,
    vocabulary: int,
) -> list[Reading]:
    """The sums of each window, from the rows of compare() and the teacher's Σ squared logits of each row; `targets`:
    those of each window, `UNCOUNTED` where a row does not count."""
    by_window = rows.reshape(len(windows), -1, rows.shape[1])
    signals = signal.reshape(len(windows), -1)
    metrics = []
    for window, window_rows, powers, answers in zip(
        windows, by_window, signals, targets.cpu().numpy(), strict=True
    ):
        counted = answers != UNCOUNTED
        values = window_rows[counted]
        power = powers[counted]
        count = int((answers >= 0).sum())
        sums = named_sums(values, vocabulary)
        sums["signal"] = float(power.sum()) / vocabulary
        arrays = {KL: packed(values[:, KL_TEACHER_STUDENT])}
        metrics.append(Reading(window, len(values), count, sums, arrays))
    return metrics


def named_sums(rows: Floats, vocabulary: int) -> dict[str, float]:
    """Of the rows of compare()."""
    sums = dict(zip((*BUILT_IN, *OBJECTIVES), rows.sum(0).tolist(), strict=True))
    sums["squared_error"] /= vocabulary
    return sums


def check_finite(subject: str, windows: Sequence[tuple[int, float]]) -> None:
    """Refuses (window, value) pairs with NaN or infinity: stored, they would spoil every plan made from them."""
    for window, value in windows:
        if not math.isfinite(value):
            raise RunError(
                f"{subject}: the logits on window {window} are NaN or infinite, so nothing can be measured; "
                "check the weights, or compute in float32"
            )


# Columns handled at once: the buffers of this length stay in the L1 cache.
_TILE = 1024
# Below this |d|, e^d - 1 - d is a series; at the border its first omitted term is 8e-7 of the value.
_SERIES = float32(0.5)
# Its square as an integer: non-negative floats sort like their bits.
_SERIES_BITS = int32((_SERIES * _SERIES).view(int32))

_REDUCTION = FAST_MATH | {"reassoc"}


@njit(fastmath=_REDUCTION, error_model="numpy", cache=True)
def _sum(values, count):  # type: ignore[no-untyped-def]
    total = float32(0)
    for i in range(count):
        total += values[i]
    return float64(total)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _exponentials(values, offset, count, out):  # type: ignore[no-untyped-def]
    for i in range(count):
        out[i] = exp2_decay(values[i] * LOG2_E + offset)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _log_sum_exp(row, top, exponentials):  # type: ignore[no-untyped-def]
    """log Σ exp, and the sum of the exponentials left in the buffer, which are exp(row) up to a common factor."""
    offset = float32(-top * LOG2_E)
    total = 0.0
    for first in range(0, row.shape[0], _TILE):
        count = min(_TILE, row.shape[0] - first)
        tile = exponentials[first : first + count]
        _exponentials(row[first : first + count], offset, count, tile)
        total += _sum(tile, count)
    return np.log(total) - float64(offset) / float64(LOG2_E), total


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def _choose(mask, yes, no):  # type: ignore[no-untyped-def]
    """`yes` where all bits of the mask are set, `no` where none is."""
    return from_bits(int32((float_bits(yes) & mask) | (float_bits(no) & ~mask)))  # type: ignore[call-arg]


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _terms(  # type: ignore[no-untyped-def]
    teacher,
    student,
    exponentials,
    scale,
    teacher_lse,
    shift,
    count,
    forward,
    backward,
    error,
):
    """Per column: its share of both divergences, and its squared error."""
    offset = float32(-teacher_lse * LOG2_E)
    for i in range(count):
        difference = student[i] - teacher[i]
        d = difference - shift
        p = exp2_decay(teacher[i] * LOG2_E + offset)
        q = exponentials[i] * scale
        square = d * d
        low = float32(1 / 2) + d * float32(1 / 6)
        middle = float32(1 / 24) + d * float32(1 / 120)
        high = float32(1 / 720) + d * float32(1 / 5040)
        small_forward = p * square * (low + square * (middle + square * high))
        # d e^d - e^d + 1 = d (d + f) - f, where f = e^d - 1 - d
        small_backward = d * (p * d + small_forward) - small_forward
        gain = q - p
        # Compared and selected by bits: with an `if` the compiler does not vectorise the loop.
        is_small = int32(int32(float_bits(square) - _SERIES_BITS) >> int32(31))  # type: ignore[call-arg]
        forward[i] = _choose(is_small, small_forward, gain - p * d)
        backward[i] = _choose(is_small, small_backward, q * d - gain)
        error[i] = difference * difference


@njit(parallel=True, error_model="numpy", cache=True)
def _log_sum_exps(rows, out):  # type: ignore[no-untyped-def]
    for r in prange(rows.shape[0]):
        top = largest(rows[r], np.empty(LANES, float32))
        out[r], _ = _log_sum_exp(rows[r], top, np.empty(rows.shape[1], float32))


@njit(parallel=True, error_model="numpy", cache=True)
def _compare(teacher, teacher_lse, teacher_top, student, targets, out):  # type: ignore[no-untyped-def]
    columns = teacher.shape[1]
    for r in prange(teacher.shape[0]):
        exponentials = np.empty(
            columns, float32
        )  # of the whole row, because they are needed twice
        forward = np.empty(_TILE, float32)
        backward = np.empty(_TILE, float32)
        error = np.empty(_TILE, float32)
        top = largest(student[r], np.empty(LANES, float32))
        lse, total = _log_sum_exp(student[r], top, exponentials)
        forward_sum = 0.0
        backward_sum = 0.0
        error_sum = 0.0
        for first in range(0, columns, _TILE):
            count = min(_TILE, columns - first)
            last = first + count
            _terms(
                teacher[r, first:last],
                student[r, first:last],
                exponentials[first:last],
                float32(1 / total),
                float32(teacher_lse[r]),
                float32(lse - teacher_lse[r]),
                count,
                forward,
                backward,
                error,
            )
            forward_sum += _sum(forward, count)
            backward_sum += _sum(backward, count)
            error_sum += _sum(error, count)
        out[r, 0] = forward_sum
        out[r, 1] = backward_sum
        out[r, 2] = error_sum
        target = targets[r]
        if target >= 0:
            out[r, 3] = (float64(teacher[r, target]) - teacher_lse[r]) - (
                float64(student[r, target]) - lse
            )
        else:
            out[r, 3] = 0.0
        out[r, 4] = 1.0 if student[r, teacher_top[r]] >= top else 0.0
