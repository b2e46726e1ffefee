"""Integers with one scale per row or per group, as in NNCF and in the paper; unsigned ones have a zero point too.

NNCF's INT4_SYM and INT8_SYM, bit for bit, with f = 2^(bits−1), in float32:

    s = |min|/f where |min| ≥ max, else −max/f      (about half of the scales are negative)
    s = 2^−23 where |s| < 2^−23                     (zero rows; loses the sign)
    q = clip(round half to even(w / s), −f, f−1)    (with the float32 scale)
    w′ = q · fp16(s)                                (only the stored scale is rounded)

The element of largest magnitude lands on −f, so no level is wasted. Where both signs reach almost the same
magnitude, or a row is one positive constant, the other extreme wants +f and is clipped to f−1: an error
of up to one whole step (12 % of a constant positive row at 4 bits).

INT4_ASYM, bit for bit, in float32, and the same rule with 2 bits (3 for 15), which NNCF lacks:

    low, high = min(w, 0), max(w, 0)                (zero is always a level)
    s = (high − low)/15, 2^−23 where it is smaller
    z = clip(−round half to even(low / s), 0, 15)
    q = clip(round half to even(w / s + z), 0, 15)  (with the float32 scale)
    w′ = (q − z) · fp16(s)                          (only the stored scale is rounded)

The error is at most half a step for any signs; a row on one side of zero uses all its levels there. The zero
point costs four bits per group: 0.125 bits a weight in groups of 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats.format import Bytes, Format, Quantized, Shape, register

# float32's machine epsilon; still exact in FP16, as a subnormal.
NNCF_SMALLEST_SCALE = 2.0**-23
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class GroupedFormat(Format):
    """Numbers of a few bits with one scale per row or group."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Data type of scales; FP16 as in NNCF."""
        return torch.float16

    def stored_scales(self, scales: Tensor) -> Tensor:
        """Scales in float32, as a file holds them."""
        return scales.to(self.scale_dtype)

    def scale_values(self, stored: Tensor) -> Tensor:
        """The same back in float32."""
        return stored.float()

    def _quantize(self, weight: Tensor) -> Quantized:
        groups = self._grouped(weight)
        scales = self.covering_scales(groups)
        return self._stored(weight, self._codes(groups / scales), scales)

    def covering_scales(self, groups: Tensor) -> Tensor:
        """The float32 scale of each group (…, columns): (…, 1)."""
        raise NotImplementedError

    def _codes(self, scaled: Tensor) -> Tensor:
        """Of weights divided by their scales."""
        raise NotImplementedError

    def _stored(
        self,
        weight: Tensor,
        codes: Tensor,
        scales: Tensor,
        zero_points: Tensor | None = None,
    ) -> Quantized:
        """Codes (…, rows, groups, columns of a group), and scales (…, rows, groups, 1)."""
        zeros = None if zero_points is None else zero_points.squeeze(-1)
        stored = self.stored_scales(scales.squeeze(-1))
        return Quantized(self.name, tuple(weight.shape), codes.flatten(-2), stored, zeros)

    def _grouped(self, weight: Tensor) -> Tensor:
        """(…, rows, groups, columns of a group)."""
        return weight.unflatten(-1, (-1, self._columns_per_group(weight.shape)))

    def _places(self, codes: Tensor) -> Tensor:
        """What the scales are multiplied with, in float32."""
        return codes.float()

    def dequantize(self, quantized: Quantized) -> Tensor:
        assert quantized.scales is not None
        groups = self._grouped(self._places(quantized.data))
        if quantized.zero_points is not None:
            groups -= quantized.zero_points.float().unsqueeze(-1)
        return groups.mul_(self.scale_values(quantized.scales).unsqueeze(-1)).flatten(-2)

    def _bytes(self, shape: Shape) -> int:
        # Small numbers are packed across rows: only the last byte can be partly empty.
        numbers = (math.prod(shape) * self.bits + 7) // 8
        return numbers + self._groups(shape) * self.scale_dtype.itemsize

    def pack(self, quantized: Quantized) -> Bytes:
        if self.bits == 8:
            return super().pack(quantized)
        return pack_codes(quantized.data, self.bits)

    def _columns_per_group(self, shape: Shape) -> int:
        return self.group_size or shape[-1]

    def _groups(self, shape: Shape) -> int:
        return math.prod(shape[:-1]) * (shape[-1] // self._columns_per_group(shape))


def pack_codes(numbers: Tensor, bits: int) -> Bytes:
    """One stream of bits, the first number in the lowest bits of the first byte."""
    values = numbers.cpu().to(torch.int8).numpy().reshape(-1).view(np.uint8)
    # Eight numbers in as many bytes as one has bits.
    eights = np.append(values, np.zeros(-values.size % 8, np.uint8)).reshape(-1, 8)
    packed = np.zeros((len(eights), bits), np.uint8)
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        codes = eights[:, index] & (2**bits - 1)
        packed[:, byte] |= codes << shift
        if shift + bits > 8:
            packed[:, byte + 1] |= codes >> (8 - shift)
    return packed.reshape(-1)[: -(-values.size * bits // 8)]


@dataclass(frozen=True)
class IntegerFormat(GroupedFormat):
    def _codes(self, scaled: Tensor) -> Tensor:
        levels = 2 ** (self.bits - 1)
        return scaled.round_().clamp_(-levels, levels - 1).to(torch.int8)


@dataclass(frozen=True)
class SignedScaleFormat(IntegerFormat):
    """NNCF's symmetric modes; the formula is in the module's docstring."""

    def covering_scales(self, groups: Tensor) -> Tensor:
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        scales = torch.where(low.abs() >= high, low.abs(), -high) / 2 ** (self.bits - 1)
        return torch.where(
            scales.abs() < NNCF_SMALLEST_SCALE, NNCF_SMALLEST_SCALE, scales
        )


@dataclass(frozen=True)
class AbsoluteMaximumFormat(IntegerFormat):
    """max|w|/(f−1), float32 scales: what the published sensitivity code measured. No runtime stores it."""

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32

    def covering_scales(self, groups: Tensor) -> Tensor:
        largest = groups.abs().amax(-1, keepdim=True)
        # A tensor as divisor: GPUs turn division by a number into a product with its rounded inverse.
        scales = largest / torch.full_like(largest, 2 ** (self.bits - 1) - 1)
        return torch.where(scales == 0, 1.0, scales)


def register_groups(
    kind: type[GroupedFormat],
    stem: str,
    bits: int,
    groups: Sequence[int] = GROUPS,
    last: str = "int8",
) -> None:
    """`STEM-gN` for groups of N columns. Where N does not divide the columns, smaller ones replace it, then `last`."""
    for group in groups:
        smaller = (f"{stem}-g{size}" for size in groups if size < group)
        register(kind(f"{stem}-g{group}", bits, group, (*smaller, last)))


register(SignedScaleFormat("int8", 8))
register(SignedScaleFormat("int4", 4))
register(AbsoluteMaximumFormat("int8-absmax", 8))
register(AbsoluteMaximumFormat("int4-absmax", 4))

# If groups do not divide the columns, NNCF stops with an error by default. When allowed to adjust, it takes the largest
# power of two from 32 up that divides them, or else its 8-bit backup. So do these.
register_groups(SignedScaleFormat, "int4", 4)
register_groups(SignedScaleFormat, "int8", 8, groups=(128,))


@dataclass(frozen=True)
class ZeroPointFormat(GroupedFormat):
    """`Quantized.data` and `.zero_points` are uint8, 0 to 15 or 3; zero points have the shape of the scales."""

    symmetric = False

    def _bytes(self, shape: Shape) -> int:
        return super()._bytes(shape) + (self._groups(shape) * self.bits + 7) // 8

    def pack_zero_points(self, quantized: Quantized) -> Bytes:
        """The zero points as in a file: of the same type as the weights."""
        assert quantized.zero_points is not None
        return pack_codes(quantized.zero_points, self.bits)

    def _quantize(self, weight: Tensor) -> Quantized:
        top = 2**self.bits - 1
        groups = self._grouped(weight)
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        low = low.clamp(max=0)
        high = high.clamp(min=0)
        # A tensor as divisor: GPUs turn division by a number into a product with its rounded inverse.
        scales = (high - low) / torch.full_like(high, top)
        scales = torch.where(scales < NNCF_SMALLEST_SCALE, NNCF_SMALLEST_SCALE, scales)
        zero_points = (-(low / scales).round()).clamp(0, top)
        integers = (groups / scales).add_(zero_points).round_().clamp_(0, top)
        return self._stored(
            weight, integers.to(torch.uint8), scales, zero_points.to(torch.uint8)
        )


# Replacements as for the symmetric formats.
register(ZeroPointFormat("uint4", 4))
register_groups(ZeroPointFormat, "uint4", 4)
register(ZeroPointFormat("uint2-g64", 2, 64, ("int4-g32", "int8")))


@dataclass(frozen=True)
class PackedFormat(SignedScaleFormat):
    """Codes of a number of bits that does not divide a byte, stored without a sign. A row is one stream of bits; groups
    of 32 or more end with a 32-bit word."""

    def pack(self, quantized: Quantized) -> Bytes:
        return pack_codes(quantized.data + 2 ** (self.bits - 1), self.bits)


# What compressed-tensors' `pack-quantized` has and OpenVINO has not.
register(ZeroPointFormat("uint8", 8))
for _bits in (3, 5, 6):
    register_groups(PackedFormat, f"int{_bits}", _bits)
register_groups(SignedScaleFormat, "int8", 8, groups=(64, 32))  # NNCF has 128
register_groups(ZeroPointFormat, "uint8", 8, last="uint8")
