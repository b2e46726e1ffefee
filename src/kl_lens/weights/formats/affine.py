"""MLX's affine integers: a scale and a bias, both float16, for every group. `mx.quantize` of a float16 matrix, bit for
bit, in float32 except for what is stored:

    s = max((max − min)/(2^bits − 1), 1e-7), negative where |min| ≤ |max|
    edge = min where |min| > |max|, else max;  k = round half to even(edge / s)
    s = edge / k, b = edge where k is not 0; else b = 0     (so that zero is a level)
    q = clip(round half to even((w − b) / s), 0, 2^bits − 1)
    w′ = q · fp16(s) + fp16(b)

MLX computes w′ in the type of the activations. In float32 it is exactly this: the product is exact, the sum is rounded
once. In float16 its CPU kernels round product and sum, and on Metal that depends on the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats.format import FP16, Quantized, Shape
from kl_lens.weights.formats.integer import GroupedFormat, register_groups

SMALLEST_SCALE = 1e-7
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class AffineFormat(GroupedFormat):
    """`Quantized.data` is uint8, `.zero_points` the biases: the values of code 0, float16, shaped as the scales."""

    symmetric = False

    def _bytes(self, shape: Shape) -> int:
        return super()._bytes(shape) + self._groups(shape) * self.scale_dtype.itemsize

    def _quantize(self, weight: Tensor) -> Quantized:
        top = 2**self.bits - 1
        half = weight.half().float()  # mlx-lm converts the model to float16 first
        groups = self._grouped(half)
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        # A tensor as divisor: GPUs turn division by a number into a product with its rounded inverse.
        scales = ((high - low) / torch.full_like(high, top)).clamp_min(SMALLEST_SCALE)
        downwards = low.abs() > high.abs()
        scales = torch.where(downwards, scales, -scales)
        edges = torch.where(downwards, low, high)
        steps = (edges / scales).round()
        away = steps != 0
        scales = torch.where(away, edges / torch.where(away, steps, 1), scales)
        biases = torch.where(away, edges, 0)
        codes = ((groups - biases) / scales).round_().clamp_(0, top)
        return self._stored(weight, codes.to(torch.uint8), scales, biases.half())

    def dequantize(self, quantized: Quantized) -> Tensor:
        assert quantized.scales is not None
        assert quantized.zero_points is not None
        groups = self._grouped(quantized.data.float())
        groups.mul_(quantized.scales.float().unsqueeze(-1))
        return groups.add_(quantized.zero_points.float().unsqueeze(-1)).flatten(-2)


for _bits in BITS:
    register_groups(AffineFormat, f"affine{_bits}", _bits, last=FP16)
