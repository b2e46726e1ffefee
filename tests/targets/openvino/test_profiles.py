"""Formats that a device cannot hold are refused, or visibly replaced."""

import pytest

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Plan
from kl_lens.targets.exporting import Choice
from kl_lens.targets.openvino.profiles import PROFILES, realise
from tests.targets.openvino.conftest import export, untouched

IN_PROJ = "backbone.layers.0.mixer.in_proj"


def realised(
    assignment: dict[str, str], profile: str = "cpu", *, fallback: bool = True
) -> dict[str, Choice]:
    plan = Plan("p", assignment, "test")
    return realise(untouched("mamba"), plan, PROFILES[profile], fallback=fallback)


@pytest.mark.parametrize(
    ("profile", "wanted", "stored"),
    [
        ("cpu", "uint4-g32", "uint4-g32"),
        ("cpu", "nf4-g32", "nf4-g32"),
        ("cpu", "mxfp4", "mxfp4"),
        ("gpu-int4", "mxfp4", "int4"),
        ("gpu", "uint2-g64", "int8"),
        ("gpu-int4", "uint4-g32", "uint4-g32"),
        ("gpu-int4", "nf4-g32", "int4"),
        ("gpu", "uint4", "int8"),
        ("npu", "uint4", "int4"),
        ("gpu-int4", "int4", "int4"),
        ("gpu", "int4", "int8"),
        ("cpu", "q4_0", "int4"),
        ("cpu", "int8-absmax", "int8"),
    ],
)
def test_what_a_device_does_not_hold_is_replaced_visibly(
    profile: str, wanted: str, stored: str
) -> None:
    chosen = realised({IN_PROJ: wanted}, profile)
    assert (chosen[IN_PROJ].planned, chosen[IN_PROJ].recipe) == (wanted, stored)
    assert {name for name, choice in chosen.items() if choice.recipe != "fp16"} == {
        IN_PROJ
    }
    if wanted == stored:
        assert (
            realised({IN_PROJ: wanted}, profile, fallback=False)[IN_PROJ].reason is None
        )
        return
    assert f"stored as {stored}" in (chosen[IN_PROJ].reason or "")
    with pytest.raises(
        TargetError, match=rf"does not fit: .*in_proj: {wanted}: .*--fallback"
    ):
        realised({IN_PROJ: wanted}, profile, fallback=False)


def test_settings_that_make_no_sense(tmp_path) -> None:
    model = untouched("mamba")
    plan = Plan("none", {}, made_by="test")
    for options, message in [
        ({"device_profile": "tpu"}, "no device profile is called 'tpu'"),
        ({"device_profile": "npu"}, "needs fixed shapes"),
        ({"with_head": False}, "only with --static-tokens"),
        ({"static_tokens": 0}, "at least 1"),
        ({"static_tokens": 100, "device_profile": "npu"}, "at most 64 tokens"),
    ]:
        with pytest.raises(TargetError, match=message):
            export(model, plan, tmp_path, **options)
