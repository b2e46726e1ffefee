"""Models in PyTorch what OpenVINO's fast ARM kernels compute, to predict KL as deployed.

With dynamic quantization the CPU plugin multiplies integers by integers (KleidiAI kernels): besides the weights, each
row of activations is rounded to 8 bits just before the product. The rules below were found by measuring single
products on OpenVINO 2026.4.1 and reproduce them to 1e-7 of their largest element:

- activations: asymmetric, one scale per token, over the range from min(x, 0) to max(x, 0) in 255 steps;
- weights with one scale per row: exactly the stored integers and FP16 scales;
- 4-bit weights in several groups per row: the same integers, but each scale goes to bfloat16 by adding half a unit
  only where the last kept bit is one (then cutting), and not to the nearest;
- 4-bit weights with zero points in groups: exactly the stored weights; activations symmetric, one scale per token and
  group, 127 steps. With zero points per row, in 2 bits, NF4 and MXFP4, nothing is
  rounded.

Products with the stacked experts of a mixture are not covered by those kernels and are left alone. An embedding that is
tied to the head is looked up with the head's rounded scales here, and with its own in OpenVINO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from kl_lens.targets.inputs import Change, inputs_changed
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.recipes import Recipe


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Rounds every row (token) of x to 8-bit integers with its own scale and zero point; float32 out."""
    values = x.float()
    low = values.amin(-1, keepdim=True).clamp(max=0)
    high = values.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    integers = ((values / scale).round() + zero).clamp(-128, 127)
    return ((integers - zero) * scale).to(x.dtype)


def quantize_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rounds every group of `size` elements to 8-bit integers with its own scale; float32 out."""
    groups = x.float().unflatten(-1, (-1, size))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return ((groups / scale).round() * scale).flatten(-2).to(x.dtype)


def kernel_values(fmt: Format, quantized: Quantized) -> torch.Tensor:
    """The float32 weights that the kernels multiply with. Weights with zero points, NF4 and MXFP4 stay exact."""
    if not isinstance(fmt, SignedScaleFormat) or fmt.bits != 4:
        return fmt.dequantize(quantized)
    assert quantized.scales is not None
    if quantized.scales.shape[-1] == 1:
        return fmt.dequantize(quantized)
    groups = quantized.data.float().unflatten(-1, (quantized.scales.shape[-1], -1))
    return (groups * _cut_to_bfloat16(quantized.scales.float())[..., None]).flatten(-2)


def _cut_to_bfloat16(scales: torch.Tensor) -> torch.Tensor:
    bits = scales.contiguous().view(torch.int32)
    bits = bits + ((bits & 0x10000) >> 1)
    return (bits & ~0xFFFF).view(torch.float32)


@contextmanager
def as_deployed(model: nn.Module, recipes: Mapping[str, Recipe]) -> Iterator[None]:
    """Within the block, inputs of the named components are rounded as the deployed settings on ARM round them.

    Args:
        model: a transformers causal language model. Its weights are not changed; set them to `kernel_values` yourself.
        recipes: component → realised recipe; components that are not named stay as they are.
    """
    modules = dict(model.named_modules())
    changes: dict[str, Change] = {}
    for name, recipe in recipes.items():
        grid = recipe.grid if name in modules else None
        if isinstance(grid, SignedScaleFormat):
            changes[name] = quantize_activations
        elif isinstance(grid, ZeroPointFormat) and grid.bits == 4:
            columns = model.get_parameter(f"{name}.weight").shape[-1]
            if (size := grid.group_size or columns) < columns:  # one group is a row
                changes[name] = partial(quantize_groups, size=size)
    with inputs_changed(model, changes):
        yield
