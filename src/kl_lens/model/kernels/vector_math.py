"""Exponentials and what is made of them, for one float32, in a form that numba's loops turn into SIMD code."""

from __future__ import annotations

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numpy import float32, int32
from torch import Tensor

from kl_lens.base.compiling import njit

LOG2_E = float32(1.4426950408889634)
# Adding and subtracting 1.5·2²³ rounds a float32 to the nearest integer and leaves that integer in the low bits.
_ROUNDER = float32(12582912.0)
_LARGEST_EXPONENT = float32(126.0)
# 2^f on [-1/2, 1/2] with a largest relative error of 1.9e-9 (weighted least squares, iterated to equal ripple).
_P0, _P1, _P2, _P3 = map(
    float32,
    (1.0000000005542005, 0.6931472057374122, 0.2402264689031655, 0.055503287765051305),
)
_P4, _P5, _P6 = map(
    float32, (0.009618488996532993, 0.0013399931449460045, 0.00015345800256696837)
)


def plain(tensor: Tensor) -> np.ndarray:
    """A dense float32 array for numba."""
    return tensor.detach().to(torch.float32).contiguous().numpy()


@intrinsic
def float_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """A float32's bits as int32: numba has no cast that LLVM vectorises."""

    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), build


@intrinsic
def from_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """An int32's bits as float32."""

    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), build


# No reassociation: it would undo the rounding trick. Contraction to fused multiply-add is welcome. No promise of no
# NaNs: a broken weight has to show in the logits (on x86-64 the kernels are as fast without it). For the same reason
# the value comes first in every max and min here: numba keeps the first where a comparison is false.
FAST_MATH = {"contract", "nsz"}


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def exp2_bounded(z: float32) -> float32:
    """2^z without a branch, to about 1e-7 relative, for |z| ≤ 126."""
    shifted = z + _ROUNDER
    f = z - (shifted - _ROUNDER)
    # Estrin's order: half the depth of Horner's, and the loop around it is bound by latency.
    g = f * f
    high = (_P5 * f + _P4) + _P6 * g
    p = (_P1 * f + _P0) + g * ((_P3 * f + _P2) + g * high)
    return from_bits(  # type: ignore[call-arg]
        int32(float_bits(p) + int32(float_bits(shifted) << int32(23)))  # type: ignore[call-arg]
    )


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def exp2_clamped(z: float32) -> float32:
    """2^z for any z; clamped to ±126."""
    return exp2_bounded(min(max(z, -_LARGEST_EXPONENT), _LARGEST_EXPONENT))


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def exp2_decay(z: float32) -> float32:
    """2^z for z ≤ 0: one comparison less in the innermost loop."""
    return exp2_bounded(max(z, -_LARGEST_EXPONENT))


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def softplus(x: float32) -> float32:
    """log(1 + e^x) without a branch: max(x, 0) + log1p(e^-|x|), the logarithm by its atanh series."""
    u = exp2_clamped(-abs(x) * LOG2_E)
    s = u / (float32(2) + u)  # ≤ 1/3
    q = s * s
    series = float32(1 / 11) + q * float32(1 / 13)
    series = float32(1 / 9) + q * series
    series = float32(1 / 7) + q * series
    series = float32(1 / 5) + q * series
    series = float32(1 / 3) + q * series
    return max(x, float32(0)) + float32(2) * s * (float32(1) + q * series)


@njit(inline="always", fastmath=FAST_MATH, error_model="numpy")
def silu(x: float32) -> float32:
    return x / (float32(1) + exp2_clamped(-x * LOG2_E))


# Maxima are taken in so many lanes.
LANES = 64


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def largest(values, lanes):  # type: ignore[no-untyped-def]
    """The largest value. In lanes, because the compiler does not turn a single running maximum into SIMD code."""
    rounds = values.shape[0] // LANES
    for k in range(LANES):
        lanes[k] = values[0]
    for j in range(rounds):
        part = values[LANES * j : LANES * (j + 1)]
        for k in range(LANES):
            lanes[k] = lanes[k] if lanes[k] > part[k] else part[k]
    most = lanes[0]
    for k in range(LANES):
        most = max(most, lanes[k])
    for i in range(rounds * LANES, values.shape[0]):
        most = max(most, values[i])
    return most
