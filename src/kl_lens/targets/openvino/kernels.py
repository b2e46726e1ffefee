"""What OpenVINO's kernels do: which formats they multiply with as stored, and how they round activations.

On x86 processors with VNNI, and without half precision, OpenVINO multiplies integers by integers: activations are
rounded to 8 bits just before the product, each group of 32 with a scale of its own, in 127 steps to both sides. A last
group may be shorter. Weights are exactly those stored, in every integer format. Matrices of one row or of fewer than 32
columns, stacks of experts, NF4 and MXFP4 are multiplied as floats. These rules were found by measuring single products
on OpenVINO 2026.4.1 and reproduce them to 3e-7 of their largest element. Where OpenVINO computes in half precision, on
ARM and with bfloat16 instructions, programs that set nothing get no integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from kl_lens.base.system import ON_X86
from kl_lens.model import LoadedModel
from kl_lens.targets.inputs import Change, inputs_changed
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.recipes import Recipe

_EXPANDED = ("uint2-g64", "mxfp4")


def expanded() -> tuple[str, ...]:
    """Formats that OpenVINO turns into floats on loading. Seen with 2026.4.1 on single matrices: x86-64 multiplies with
    them as stored, ARM does not. Other processors were not tried."""
    return () if ON_X86 else _EXPANDED


def is_integer(fmt: Format) -> bool:
    return isinstance(fmt, SignedScaleFormat | ZeroPointFormat)


GROUP = 32  # OpenVINO's default of DYNAMIC_QUANTIZATION_GROUP_SIZE


def quantize_groups(x: torch.Tensor) -> torch.Tensor:
    """Rounds every group of elements to 8-bit integers with its own scale."""
    columns = x.shape[-1]
    groups = nn.functional.pad(x.float(), (0, -columns % GROUP)).unflatten(
        -1, (-1, GROUP)
    )
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    rounded = (groups / scale).round() * scale
    return rounded.flatten(-2)[..., :columns].to(x.dtype)


def as_deployed(
    model: LoadedModel, recipes: Mapping[str, Recipe]
) -> AbstractContextManager[None]:
    """Within, inputs of the named components are rounded as OpenVINO's kernels round them; weights are left alone."""
    changes: dict[str, Change] = {}
    for name, recipe in recipes.items():
        shape = model.anatomy.component(name).shape
        if is_integer(recipe.grid) and len(shape) == 2:
            rows, columns = shape
            if rows > 1 and columns >= GROUP:
                changes[name] = quantize_groups
    return inputs_changed(model.model, changes)
