"""Which formats each kind of device supports, and what a plan becomes on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kl_lens.base.errors import FormatError, TargetError
from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets.exporting import Choice, choices
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

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
    bits: tuple[int, ...]  # integer widths it holds; FP16 always
    static: bool = False  # only fixed shapes, and no loops
    rewrites: tuple[str, ...] = ()
    rewrites_with_chunks: tuple[str, ...] = ()  # added for models with Mamba-2 scans
    zero_points: bool = True  # runs asymmetric integers
    floats: bool = False  # runs NF4 and MXFP4

    def holds(self, fmt: Format) -> str | None:
        """None, or why weights in this format cannot be stored for the device."""
        if fmt.name == FP16:
            return None
        asymmetric8 = fmt.bits == 8 and not fmt.symmetric
        if asymmetric8 or not isinstance(fmt, (SignedScaleFormat, ZeroPointFormat, *_FLOATS)):
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
        DeviceProfile("cpu", bits=(2, 4, 8), floats=True),
        # Intel integrated GPU (Lunar Lake)
        DeviceProfile("gpu", bits=(8,), rewrites_with_chunks=("cumba",)),
        # the same, with INT4 chosen explicitly
        DeviceProfile("gpu-int4", bits=(4, 8), rewrites_with_chunks=("cumba",)),
        # Intel NPU: fixed shapes, no loops
        DeviceProfile(
            "npu", bits=(4, 8), static=True, zero_points=False, rewrites=("cumba", "reduba", "actiba")
        ),
    )
}


def get_profile(name: str) -> DeviceProfile:
    if name not in PROFILES:
        raise TargetError(f"no device profile is called {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def realise(model: LoadedModel, plan: Plan, profile: DeviceProfile, *, fallback: bool) -> dict[str, Choice]:
    """Every component's recipe on this device. Unless `fallback` is set, TargetError for formats that the device or the
    shape does not allow."""
    chosen = choices(model, plan, partial(lowered, profile=profile))
    problems = [f"{name}: {choice.reason}" for name, choice in chosen.items() if choice.reason]
    if problems and not fallback:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TargetError(
            f"the plan does not fit: {problems[0]}{more}; change the plan, or allow substitutes with --fallback"
        )
    return chosen


def lowered(wanted: Recipe, shape: Sequence[int], profile: DeviceProfile) -> tuple[Recipe, str | None]:
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
