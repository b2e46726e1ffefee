"""Which formats each kind of device supports, and what a plan becomes on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kl_lens.base.errors import FormatError, TargetError
from kl_lens.model import Anatomy
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import SignedScaleFormat
from kl_lens.weights.formats.microscaling import MicroscalingFormat
from kl_lens.weights.formats.normal_float import NormalFloatFormat
from kl_lens.weights.formats.zero_points import ZeroPointFormat
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe, parsed

_FLOATS = (NormalFloatFormat, MicroscalingFormat)
_EXPANDED = ("uint2-g64", "mxfp4")


def expanded(machine: str) -> tuple[str, ...]:
    """Formats that OpenVINO turns into floats on loading. Seen with 2026.4.1 on single matrices: x86-64 multiplies with
    them as stored, ARM does not. Other processors were not tried."""
    return () if machine.lower() in ("x86_64", "amd64") else _EXPANDED


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device: which weights it takes, whether it needs fixed shapes, which rewrites help it."""

    name: str
    description: str
    bits: tuple[int, ...]  # integer widths it holds; FP16 always
    static_only: bool = False
    rewrites: tuple[str, ...] = ()
    rewrites_with_chunks: tuple[str, ...] = ()  # added for models with Mamba-2 scans
    zero_points: bool = True  # runs asymmetric integers
    floats: bool = False  # runs NF4 and MXFP4
    unrolled: bool = False

    def holds(self, fmt: Format) -> str | None:
        """None, or why weights in this format cannot be stored for the device."""
        if fmt.name == FP16:
            return None
        if not isinstance(fmt, (SignedScaleFormat, ZeroPointFormat, *_FLOATS)):
            return "OpenVINO stores FP16, NNCF's integers, uint2, NF4 and MXFP4 only"
        if isinstance(fmt, ZeroPointFormat) and not self.zero_points:
            return f"profile {self.name} holds symmetric integers only"
        if isinstance(fmt, _FLOATS) and not self.floats:
            return f"profile {self.name} holds no NF4 or MXFP4"
        if fmt.bits not in self.bits:
            return f"profile {self.name} holds no {fmt.bits}-bit weights"
        return None

    def default_rewrites(self, has_chunks: bool) -> tuple[str, ...]:
        return self.rewrites + (self.rewrites_with_chunks if has_chunks else ())


PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu", "x86-64 and ARM processors", bits=(2, 4, 8), floats=True),
        DeviceProfile(
            "gpu",
            "Intel integrated GPU (Lunar Lake)",
            bits=(8,),
            rewrites_with_chunks=("cumba",),
        ),
        DeviceProfile(
            "gpu-int4",
            "the same, with INT4 chosen explicitly",
            bits=(4, 8),
            rewrites_with_chunks=("cumba",),
        ),
        DeviceProfile(
            "npu",
            "Intel NPU: fixed shapes, no loops",
            bits=(4, 8),
            static_only=True,
            zero_points=False,
            rewrites=("cumba", "reduba", "actiba"),
            unrolled=True,
        ),
    )
}


def get_profile(name: str) -> DeviceProfile:
    if name not in PROFILES:
        raise TargetError(f"no device profile is called {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


@dataclass(frozen=True)
class Realised:
    """The recipe a component gets on a device, and why it is not the planned one (or None)."""

    component: str
    planned: Recipe
    recipe: Recipe
    reason: str | None


def realise(
    assignment: Mapping[str, str], anatomy: Anatomy, profile: DeviceProfile, *, fallback: bool
) -> dict[str, Realised]:
    """Every component's recipe on this device, by component name; components not planned get FP16.

    Raises TargetError for names that are not there, components that must not be quantized, and, unless `fallback`
    is set, for formats that the device or the shape does not allow; the message names each of them.
    """
    planned: dict[str, Recipe] = {}
    for name, recipe in parsed(assignment).items():
        component = anatomy.component(name)
        if planned.setdefault(component.name, recipe) != recipe:
            raise TargetError(f"{name} is the same weight as {component.name}, but planned as {recipe}")
        if not component.quantizable and recipe != FP16:
            raise TargetError(f"{name} is planned as {recipe}, but must stay as it is: {component.reason}")
    result, problems = {}, []
    for component in anatomy.components:
        wanted = planned.get(component.name, FP16)
        chosen, reason = wanted, None
        if component.name in planned:
            chosen, reason = lowered(wanted, component.shape, profile)
        if reason is not None and not fallback:
            problems.append(f"{component.name}: {reason}")
        result[component.name] = Realised(component.name, wanted, chosen, reason)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TargetError(
            f"the plan does not fit: {problems[0]}{more}; change the plan, or allow substitutes with --fallback"
        )
    return result


def lowered(wanted: Recipe, shape: tuple[int, ...], profile: DeviceProfile) -> tuple[Recipe, str | None]:
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
