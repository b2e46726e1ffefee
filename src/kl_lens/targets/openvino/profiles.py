"""What each kind of device supports, what a plan becomes on it, NNCF's mixtures, and how kernels round activations.

On x86 processors with VNNI, and without half precision, OpenVINO multiplies integers by integers: activations are
rounded to 8 bits just before the product, each group of 32 with a scale of its own, in 127 steps to both sides. A last
group may be shorter. Weights are exactly those stored, in every integer format. Matrices of one row or of fewer than 32
columns, stacks of experts, NF4 and MXFP4 are multiplied as floats. These rules were found by measuring single products
on OpenVINO 2026.4.1 and reproduce them to 3e-7 of their largest element. Where OpenVINO computes in half precision, on
ARM and with bfloat16 instructions, programs that set nothing get no integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kl_lens.base.errors import FormatError, TargetError
from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets.abilities import StockRecipe
from kl_lens.targets.exporting import Choice, choices
from kl_lens.targets.inputs import Change, inputs_changed
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import (
    NNCF_SMALLEST_SCALE,
    SignedScaleFormat,
    ZeroPointFormat,
)
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

_KINDS = (SignedScaleFormat, ZeroPointFormat, NormalFloatFormat, MicroscalingFormat)
_EXPANDED = ("uint2-g64", "mxfp4")


def expanded(machine: str) -> tuple[str, ...]:
    """Formats that OpenVINO turns into floats on loading. Seen with 2026.4.1 on single matrices: x86-64 multiplies with
    them as stored, ARM does not. Other processors were not tried."""
    return () if machine.lower() in ("x86_64", "amd64") else _EXPANDED


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device: which weights it takes, whether it needs fixed shapes and CumBA."""

    name: str
    bits: tuple[int, ...]  # of formats that it holds; FP16 always
    static: bool = False  # only fixed shapes, and no loops
    cumba: bool = False  # sums along a sequence as products
    kinds: tuple[type, ...] = (SignedScaleFormat, ZeroPointFormat)

    def holds(self, fmt: Format) -> str | None:
        """None, or why weights in this format cannot be stored for the device."""
        if fmt.name == FP16:
            return None
        asymmetric8 = fmt.bits == 8 and not fmt.symmetric
        if asymmetric8 or not isinstance(fmt, _KINDS):
            return "OpenVINO stores FP16, NNCF's integers, uint2, NF4 and MXFP4 only"
        fits = isinstance(fmt, self.kinds) and fmt.bits in self.bits
        return None if fits else f"profile {self.name} holds no {fmt.name}"


PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu", bits=(2, 4, 8), kinds=_KINDS),
        # Intel integrated GPU (Lunar Lake)
        DeviceProfile("gpu", bits=(8,), cumba=True),
        # the same, with INT4 chosen explicitly
        DeviceProfile("gpu-int4", bits=(4, 8), cumba=True),
        # Intel NPU: fixed shapes, no loops
        DeviceProfile(
            "npu", bits=(4, 8), static=True, cumba=True, kinds=(SignedScaleFormat,)
        ),
    )
}


def get_profile(name: str) -> DeviceProfile:
    if name not in PROFILES:
        raise TargetError(
            f"no device profile is called {name!r}; there are {', '.join(PROFILES)}"
        )
    return PROFILES[name]


def realise(
    model: LoadedModel, plan: Plan, profile: DeviceProfile, *, fallback: bool
) -> dict[str, Choice]:
    """Every component's recipe on this device. Unless `fallback` is set, TargetError for formats that the device or the
    shape does not allow."""
    chosen = choices(model, plan, partial(lowered, profile=profile))
    problems = [f"{name}: {c.reason}" for name, c in chosen.items() if c.reason]
    if problems and not fallback:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TargetError(
            f"the plan does not fit: {problems[0]}{more}; allow substitutes with --fallback"
        )
    return chosen


def lowered(
    wanted: Recipe, shape: Sequence[int], profile: DeviceProfile
) -> tuple[Recipe, str | None]:
    """The recipe that a weight gets on a device, and why it is not the one asked for (or None)."""
    fmt = wanted.grid
    if (reason := profile.holds(fmt)) is not None:
        # The nearest width that the device holds and that is not narrower.
        widths = [bits for bits in sorted(profile.bits) if bits >= fmt.bits]
        substitute = Recipe(f"int{widths[0]}") if widths else FP16
        return substitute, f"{wanted}: {reason}; stored as {substitute}"
    if fmt.bits == 4 and shape[-1] % 2:
        # Seen on 2026.4.1: wrong results of the right size, and no error.
        substitute = Recipe("int8") if 8 in profile.bits else FP16
        return substitute, (
            f"{wanted}: {shape[-1]} columns, and OpenVINO's ARM kernels give wrong results for an odd number "
            f"of four-bit columns; stored as {substitute}"
        )
    if len(shape) not in (2, 3):
        return FP16, f"{wanted}: no matrix; stored as {FP16}"
    try:
        chosen, reason = fitting_recipe(wanted, shape)
    except FormatError:
        return FP16, f"{wanted}: {fmt.fits(shape)}; stored as {FP16}"
    if profile.holds(chosen.grid) is not None:
        return FP16, f"{reason}, which {profile.name} does not hold; stored as {FP16}"
    return chosen, reason


_GRIDS = {"INT4_SYM": "int4", "INT4_ASYM": "uint4"}


def stock_recipes(model: LoadedModel) -> tuple[StockRecipe, ...]:
    """The mixtures that NNCF's `compress_weights` makes without data. Embedding and head get 8 bits, the rest 4. Where
    columns do not divide, groups are those of its mode ADJUST. Its 8-bit backup has zero points and ours is symmetric,
    which makes no difference worth a format. With a ratio, that share of the weights gets 4 bits, chosen by NNCF's
    data-free criterion."""
    source = "NNCF's compress_weights, mode"
    every = {c.name: Recipe("int8") for c in model.anatomy.candidates}
    recipes = [StockRecipe("INT8_SYM", every, f"{source} INT8_SYM", usual=True)]
    outer = {model.anatomy.embedding, model.anatomy.head}
    order = by_sensitivity(model, [name for name in every if name not in outer])
    shares = {1.0: "", 0.8: "-80"}
    for mode, size, ratio in itertools.product(_GRIDS, (128, 64), shares):
        name = f"{mode}-g{size}{shares[ratio]}"
        origin = f"{source} {mode}, groups of {size}, ratio {ratio:g}, data-free"
        recipe = Recipe(f"{_GRIDS[mode]}-g{size}")
        small = {
            c: fitting_recipe(recipe, model.anatomy.component(c).shape)[0]
            for c in least_sensitive(model, order, ratio)
        }
        usual = name == "INT4_SYM-g128"
        recipes.append(StockRecipe(name, every | small, origin, usual))
    return tuple(recipes)


def by_sensitivity(model: LoadedModel, names: list[str]) -> list[str]:
    """From least to most sensitive by NNCF's WEIGHT_QUANTIZATION_ERROR, one over the largest mean squared error of any
    row at its asymmetric 8 bits. So weights that 8 bits round worst get 4 bits first, whatever that does to the model.
    """

    def error(name: str) -> float:
        weight = model.tensor(model.anatomy.component(name).weight).float()
        low = weight.amin(-1, keepdim=True).clamp(max=0)
        high = weight.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=NNCF_SMALLEST_SCALE)
        zero = (-(low / scale).round()).clamp(0, 255)
        stored = ((weight / scale + zero).round().clamp(0, 255) - zero) * scale
        return float((stored - weight).square().mean(-1).max())

    return sorted(names, key=error, reverse=True)


def least_sensitive(model: LoadedModel, order: list[str], ratio: float) -> list[str]:
    """The first components in order that together hold less than `ratio` of all weights."""
    if ratio == 1:
        return order
    sizes = [model.anatomy.component(name).parameters for name in order]
    together = itertools.accumulate(sizes)
    return [
        name
        for name, total in zip(order, together, strict=True)
        if total < ratio * sum(sizes)
    ]


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
