"""Formats that a device cannot hold are refused, or visibly replaced."""

from __future__ import annotations

import platform

import pytest

from kl_lens.base.errors import CheckpointError, TargetError
from kl_lens.run.records import Plan
from kl_lens.targets import get_target
from kl_lens.targets.exporting import Choice
from kl_lens.targets.openvino.profiles import PROFILES, get_profile, realise
from kl_lens.weights.formats import get_format
from tests.targets.openvino.conftest import export, untouched

IN_PROJ = "backbone.layers.0.mixer.in_proj"
DT_PROJ = "backbone.layers.0.mixer.dt_proj"  # five columns


def realised(assignment: dict[str, str], profile: str = "cpu", *, fallback: bool = True) -> dict[str, Choice]:
    plan = Plan("p", assignment, "test")
    return realise(untouched("mamba"), plan, PROFILES[profile], fallback=fallback)


def test_int4_on_the_gpu_is_an_explicit_choice() -> None:
    with pytest.raises(TargetError, match=r"in_proj: int4: profile gpu holds no 4-bit.*--fallback"):
        realised({IN_PROJ: "int4"}, "gpu", fallback=False)
    lowered = realised({IN_PROJ: "int4"}, "gpu")[IN_PROJ]
    assert (lowered.planned, lowered.recipe) == ("int4", "int8")
    assert "stored as int8" in (lowered.reason or "")
    assert realised({IN_PROJ: "int4"}, "gpu-int4", fallback=False)[IN_PROJ].recipe == "int4"


@pytest.mark.parametrize(
    ("profile", "wanted", "given"),
    [
        ("cpu", "uint4-g32", "uint4-g32"), ("cpu", "nf4-g32", "nf4-g32"), ("cpu", "mxfp4", "mxfp4"),
        ("gpu-int4", "mxfp4", "int4"), ("gpu", "uint2-g64", "int8"), ("gpu-int4", "uint4-g32", "uint4-g32"),
        ("gpu-int4", "nf4-g32", "int4"), ("gpu", "uint4", "int8"), ("npu", "uint4", "int4"),
    ],
)  # fmt: skip
def test_zero_points_and_normal_floats_are_not_for_every_device(
    profile: str, wanted: str, given: str
) -> None:
    choice = realised({IN_PROJ: wanted}, profile)[IN_PROJ]
    assert choice.recipe == given
    assert (choice.reason is None) == (wanted == given)


@pytest.mark.parametrize(
    ("wanted", "given"), [("int4-g32", "int8"), ("int4", "int8"), ("q4_0", "int4"), ("int8-absmax", "int8")]
)
def test_formats_that_do_not_fit(wanted: str, given: str) -> None:
    component = IN_PROJ if wanted in ("q4_0", "int8-absmax") else DT_PROJ
    with pytest.raises(TargetError, match="the plan does not fit"):
        realised({component: wanted}, fallback=False)
    formats = realised({component: wanted})
    assert (formats[component].planned, formats[component].recipe) == (wanted, given)
    assert {name for name, choice in formats.items() if choice.recipe != "fp16"} == {component}


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ({"backbone.layers.9": "int8"}, CheckpointError, r"there is no component 'backbone.layers.9'"),
        ({"backbone.embeddings": "int8", "lm_head": "int4"}, TargetError, "the same weight"),
        ({"backbone.layers.0.mixer.conv1d": "int8"}, TargetError, r"must stay as it is: .*convolution"),
    ],
)
def test_plans_that_make_no_sense(assignment: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        realised(assignment)


def test_defaults_of_the_profiles() -> None:
    assert PROFILES["cpu"].default_rewrites(True) == PROFILES["gpu"].default_rewrites(False) == ()
    assert PROFILES["gpu"].default_rewrites(True) == ("cumba",)
    assert PROFILES["npu"].default_rewrites(False) == ("cumba", "reduba", "actiba")
    with pytest.raises(TargetError, match="no device profile is called 'tpu'"):
        get_profile("tpu")


def test_settings_that_make_no_sense(tmp_path) -> None:
    model, plan = untouched("mamba"), Plan("none", {}, made_by="test")
    for options, message in [
        ({"device_profile": "npu"}, "needs fixed shapes"),
        ({"with_head": False}, "only with --static-tokens"),
        ({"static_tokens": 0}, "at least 1"),
        ({"unplanned": "bf16"}, "fp16 or fp32"),
        ({"static_tokens": 100, "device_profile": "npu"}, "at most 64 tokens"),
    ]:
        with pytest.raises(TargetError, match=message):
            export(model, plan, tmp_path, **options)


@pytest.mark.parametrize(
    ("machine", "offered"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("riscv64", False)]
)
def test_two_bits_are_offered_where_they_run_as_stored(
    machine: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    target = get_target("openvino")
    assert ("uint2-g64+gptq" in target.menu) == offered
    assert "mxfp4+gptq" not in target.menu  # larger losses than int4-g64 of the same bytes
    assert target.holds(get_format("uint2-g64"), (64, 64)) is None  # to be named by hand on any processor
