"""What OpenVINO's fast ARM kernels really compute, in PyTorch: for KL as deployed.

With dynamic quantization the CPU plugin multiplies integers by integers (KleidiAI kernels): besides the weights, each
row of activations is rounded to 8 bits just before the product. The rules below were found by measuring single
products on OpenVINO 2026.4.1 and reproduce them to 1e-7 of their largest element:

- activations: asymmetric, one scale per token, over the range from min(x, 0) to max(x, 0) in 255 steps;
- weights with one scale per row: exactly the stored integers and FP16 scales;
- 4-bit weights in several groups per row: the same integers, but each scale goes to bfloat16 by adding half a unit
  only where the last kept bit is one (then cutting), and not to the nearest.

Products with the stacked experts of a mixture are not covered by those kernels and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kl_lens.checkpoints import Anatomy
from kl_lens.formats import Format, get_format
from kl_lens.formats.integer import SignedScaleFormat
from kl_lens.formats.normal_float import NormalFloatFormat
from kl_lens.formats.zero_points import ZeroPointFormat


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Every row (token) of x as 8-bit integers with a scale and a zero point of its own, back in float32."""
    values = x.float()
    low = values.amin(-1, keepdim=True).clamp(max=0)
    high = values.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    integers = ((values / scale).round() + zero).clamp(-128, 127)
    return ((integers - zero) * scale).to(x.dtype)


def deployed_weight(fmt: Format, weight: torch.Tensor) -> torch.Tensor:
    """The float32 values that the kernels multiply with."""
    quantized = fmt.quantize(weight)
    if quantized.scales is None or fmt.bits != 4 or quantized.scales.shape[-1] == 1:
        return fmt.dequantize(quantized)
    groups = quantized.data.float().unflatten(-1, (quantized.scales.shape[-1], -1))
    return (groups * _cut_to_bfloat16(quantized.scales.float())[..., None]).flatten(-2)


def _cut_to_bfloat16(scales: torch.Tensor) -> torch.Tensor:
    bits = scales.contiguous().view(torch.int32)
    bits = bits + ((bits & 0x10000) >> 1)
    return (bits & ~0xFFFF).view(torch.float32)


class _MatrixOnTheLeft(nn.Module):
    """Stands in for Mamba-1's dt_proj, whose weight transformers multiplies directly: `weight @ x`."""

    def __init__(self, original: nn.Module, weight: torch.Tensor) -> None:
        super().__init__()
        self.bias = original.bias
        self.weight: Any = self  # `@` arrives here
        self._matrix = weight

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix @ quantize_activations(x.transpose(-1, -2)).transpose(-1, -2)


@contextmanager
def as_deployed(model: nn.Module, anatomy: Anatomy, assignment: Mapping[str, str]) -> Iterator[None]:
    """Within the block, the model computes what an exported artifact computes with the deployed settings on ARM.

    Args:
        assignment: component → realised format name; components that are not named stay as they are.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    with ExitStack() as stack:
        for name, format_name in assignment.items():
            fmt = get_format(format_name)
            component = anatomy.component(name)
            parameter = model.get_parameter(component.weight)
            if isinstance(
                fmt, (ZeroPointFormat, NormalFloatFormat)
            ):  # not for those kernels: no rounded activations
                stack.enter_context(_swapped(parameter, fmt.roundtrip(parameter)))
            if not isinstance(fmt, SignedScaleFormat):
                continue
            weight = deployed_weight(fmt, parameter)
            plain = fmt.roundtrip(parameter)
            for owner in (component.name, *component.tied_with):
                module = modules.get(owner)
                if isinstance(module, nn.Linear):
                    parent = modules[owner.rpartition(".")[0]]
                    if owner.endswith(".dt_proj") and hasattr(parent, "A_log"):
                        stack.enter_context(_replaced(parent, "dt_proj", _MatrixOnTheLeft(module, weight)))
                    else:
                        stack.enter_context(_patched(module, weight))
            # Embeddings and experts read the parameter itself.
            stack.enter_context(_swapped(parameter, plain))
        yield


@contextmanager
def _patched(module: nn.Linear, weight: torch.Tensor) -> Iterator[None]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(quantize_activations(x), weight, module.bias)

    module.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _replaced(parent: nn.Module, name: str, stand_in: nn.Module) -> Iterator[None]:
    original = parent._modules[name]
    parent._modules[name] = stand_in
    try:
        yield
    finally:
        parent._modules[name] = original


@contextmanager
def _swapped(parameter: nn.Parameter, values: torch.Tensor) -> Iterator[None]:
    original = parameter.data
    parameter.data = values.to(original.dtype)
    try:
        yield
    finally:
        parameter.data = original
