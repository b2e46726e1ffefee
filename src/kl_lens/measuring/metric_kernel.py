"""All metrics of a row of logits in one pass over it, on CPU.

The two divergences are formed from d = log p_student - log p_teacher so that nothing cancels:

    KL(teacher ‖ student) = Σ p (e^d - 1 - d)            because Σ p (e^d - 1) = 0
    KL(student ‖ teacher) = Σ p (d e^d - e^d + 1)

Each term is ≥ 0 and of second order in d: a series for small d; for large d, p e^d is taken as q, the student's own
probability, which cannot overflow. The textbook form Σ p (log p - log q) subtracts numbers of order one and loses
everything below 1e-7 in float32; this one is good to about 1e-13.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from kl_lens.model.kernels.vector_math import (
    FAST_MATH,
    LANES,
    LOG2_E,
    exp2_decay,
    float_bits,
    from_bits,
    largest,
)

# Columns handled at once: the buffers of this length stay in the L1 cache.
_TILE = 1024
# Below this |d|, e^d - 1 - d is a series; at the border its first omitted term is 8e-7 of the value.
_SERIES = np.float32(0.5)
# Its square as an integer: non-negative floats sort like their bits.
_SERIES_BITS = np.int32((_SERIES * _SERIES).view(np.int32))

_REDUCTION = FAST_MATH | {"reassoc"}


@njit(fastmath=_REDUCTION, error_model="numpy", cache=True)
def _sum(values, count):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(count):
        total += values[i]
    return np.float64(total)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _exponentials(values, offset, count, out):  # type: ignore[no-untyped-def]
    for i in range(count):
        out[i] = exp2_decay(values[i] * LOG2_E + offset)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _log_sum_exp(row, top, exponentials):  # type: ignore[no-untyped-def]
    """log Σ exp, and the sum of the exponentials left in the buffer, which are exp(row) up to a common factor."""
    offset = np.float32(-top * LOG2_E)
    total = 0.0
    for first in range(0, row.shape[0], _TILE):
        count = min(_TILE, row.shape[0] - first)
        tile = exponentials[first : first + count]
        _exponentials(row[first : first + count], offset, count, tile)
        total += _sum(tile, count)
    return np.log(total) - np.float64(offset) / np.float64(LOG2_E), total


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def _choose(mask, yes, no):  # type: ignore[no-untyped-def]
    """`yes` where all bits of the mask are set, `no` where none is."""
    return from_bits(np.int32((float_bits(yes) & mask) | (float_bits(no) & ~mask)))  # type: ignore[call-arg]


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def _terms(teacher, student, exponentials, scale, teacher_lse, shift, count, forward, backward, error):  # type: ignore[no-untyped-def]
    """Per column: its share of both divergences, and its squared error."""
    offset = np.float32(-teacher_lse * LOG2_E)
    for i in range(count):
        difference = student[i] - teacher[i]
        d = difference - shift
        p = exp2_decay(teacher[i] * LOG2_E + offset)
        q = exponentials[i] * scale
        square = d * d
        low = np.float32(1 / 2) + d * np.float32(1 / 6)
        middle = np.float32(1 / 24) + d * np.float32(1 / 120)
        high = np.float32(1 / 720) + d * np.float32(1 / 5040)
        small_forward = p * square * (low + square * (middle + square * high))
        # d e^d - e^d + 1 = d (d + f) - f, where f = e^d - 1 - d
        small_backward = d * (p * d + small_forward) - small_forward
        gain = q - p
        # Compared and selected by bits: with an `if` the compiler does not vectorise the loop.
        is_small = np.int32(np.int32(float_bits(square) - _SERIES_BITS) >> np.int32(31))  # type: ignore[call-arg]
        forward[i] = _choose(is_small, small_forward, gain - p * d)
        backward[i] = _choose(is_small, small_backward, q * d - gain)
        error[i] = difference * difference


@njit(parallel=True, error_model="numpy", cache=True)
def _log_sum_exps(rows, out):  # type: ignore[no-untyped-def]
    for r in prange(rows.shape[0]):
        top = largest(rows[r], np.empty(LANES, np.float32))
        out[r], _ = _log_sum_exp(rows[r], top, np.empty(rows.shape[1], np.float32))


@njit(parallel=True, error_model="numpy", cache=True)
def _compare(teacher, teacher_lse, teacher_top, student, targets, out):  # type: ignore[no-untyped-def]
    columns = teacher.shape[1]
    for r in prange(teacher.shape[0]):
        exponentials = np.empty(columns, np.float32)  # of the whole row, because they are needed twice
        forward = np.empty(_TILE, np.float32)
        backward = np.empty(_TILE, np.float32)
        error = np.empty(_TILE, np.float32)
        top = largest(student[r], np.empty(LANES, np.float32))
        lse, total = _log_sum_exp(student[r], top, exponentials)
        forward_sum, backward_sum, error_sum = 0.0, 0.0, 0.0
        for first in range(0, columns, _TILE):
            count = min(_TILE, columns - first)
            last = first + count
            _terms(
                teacher[r, first:last],
                student[r, first:last],
                exponentials[first:last],
                np.float32(1 / total),
                np.float32(teacher_lse[r]),
                np.float32(lse - teacher_lse[r]),
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
            out[r, 3] = (np.float64(teacher[r, target]) - teacher_lse[r]) - (
                np.float64(student[r, target]) - lse
            )
        else:
            out[r, 3] = 0.0
        out[r, 4] = 1.0 if student[r, teacher_top[r]] >= top else 0.0


def log_sum_exp(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """log Σ exp of each row."""
    out = np.empty(rows.shape[0], np.float64)
    _log_sum_exps(rows, out)
    return out


def compare_rows(
    teacher: npt.NDArray[np.float32],
    teacher_lse: npt.NDArray[np.float64],
    teacher_top: npt.NDArray[np.int64],
    student: npt.NDArray[np.float32],
    targets: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Per row: KL(teacher‖student), KL(student‖teacher), Σ squared error, change in cross-entropy, same top token.

    A target of -1 means that the row has no true next token; its change in cross-entropy is 0.
    """
    out = np.empty((teacher.shape[0], 5), np.float64)
    _compare(teacher, teacher_lse, teacher_top, student, targets, out)
    return out
