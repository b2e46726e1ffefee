"""Formats that OpenVINO or a shape cannot hold are refused, or visibly replaced."""

import pytest

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Plan
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe
from tests.targets.openvino.conftest import export, untouched


@pytest.mark.parametrize(
    ("wanted", "shape", "stored", "reason"),
    [
        ("uint4-g32", (8, 64), "uint4-g32", None),
        ("nf4-g32+search", (8, 64), "nf4-g32+search", None),
        ("mxfp4", (2, 8, 64), "mxfp4", None),
        ("int4-g64", (8, 32), "int4-g32", "stored as int4-g32"),
        ("int4-g64+gptq", (8, 48), "int8+gptq", "stored as int8"),
        ("uint4", (8, 33), "int8", "odd number of four-bit columns; stored as int8"),
        ("int8", (8, 33), "int8", None),
        ("int4", (64,), "fp16", "no matrix; stored as fp16"),
        ("int8", (4, 4, 3, 3), "fp16", "no matrix; stored as fp16"),
    ],
)
def test_what_a_shape_does_not_hold_is_replaced_visibly(
    wanted: str, shape: tuple[int, ...], stored: str, reason: str | None
) -> None:
    target = get_target("openvino")
    recipe = Recipe.parse(wanted)
    fitting, words = target.fit(recipe, shape)
    assert fitting == stored
    assert (words or "").endswith(reason or "")
    assert (words is None) == (reason is None)
    assert target.holds(recipe.grid, shape) == (
        words and words.replace(wanted, recipe.grid.name, 1)
    )


@pytest.mark.parametrize("name", ["q4_0", "int8-absmax", "int6-g64", "uint8-g64"])
def test_what_openvino_lacks_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match=f"has no {name}: .*--target openvino"):
        get_target("openvino").fit(Recipe(name), (8, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"with_head": False}, "only with --static-tokens"),
        ({"static_tokens": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, options: dict, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        export(untouched("mamba"), Plan("none", {}, made_by="test"), tmp_path, **options)
