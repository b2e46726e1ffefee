"""The integers on disk are those of kl_lens.weights.formats, each component exactly once."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from kl_lens.base.errors import TargetError
from kl_lens.base.system import ON_ARM
from kl_lens.run.records import Plan
from kl_lens.targets import describe_target, get_target, open_session, quarantine
from kl_lens.targets.dissection import StoredTensor
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import Recipe
from tests.families import token_ids
from tests.targets.openvino.conftest import (
    assert_same_logits,
    export,
    loaded,
    reference,
    untouched,
)

SLOW = [
    "falcon_mamba",
    "mamba2",
    "falcon_h1",
    "zamba2",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
]
SLOW += ["hymba", "zamba", "lfm2", "qwen3_next", "kimi_linear", "minimax", "rwkv"]
plans = pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("mamba", "unsigned"),
        ("mamba", "mixed"),
        *(
            pytest.param(name, "mixed", marks=pytest.mark.slow)
            for name in ("jamba_experts", *SLOW)
        ),
        pytest.param("jamba_experts", "unsigned", marks=pytest.mark.slow),
    ],
)
ELEMENTS = {
    "int8": "i8",
    "int4": "i4",
    "uint4": "u4",
    "nf4": "nf4",
    "uint2": "u2",
    "mxfp4": "f4e2m1",
}


def apart(folder: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name; it is our own, so it is not tried in another process first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quarantine, "require_opens", lambda *_: None)
        tensors = describe_target("openvino").dissect(folder).tensors
    return {tensor.name: tensor for tensor in tensors}


@plans
def test_the_file_holds_the_formats_integers_and_computes_with_them(
    family: str, plan: str, exported: Callable
) -> None:
    case = exported(family, plan)
    stored = apart(case.folder)
    anatomy = case.model.anatomy
    model = loaded(family).model
    formats_seen = set()
    names = {tensor.component: tensor.runtime_name for tensor in case.artifact.tensors}
    assert {c.name: c.weight for c in anatomy.candidates}.items() <= names.items()
    for record in case.artifact.tensors:
        component = anatomy.component(record.component)
        tensor = stored[record.runtime_name]
        if record.realised == "fp32":
            assert tensor.type == "f32"
            continue
        assert component.quantizable
        fmt = get_format(record.realised)
        weight = model.get_parameter(component.weight)
        expected = fmt.roundtrip(weight)
        assert torch.equal(tensor.read().reshape(weight.shape), expected)
        kind = fmt.name.partition("-")[0]
        assert tensor.type.partition(" ")[0] == ELEMENTS[kind]
        # Four bits really take half a byte: integers, scales and zero points are the format's own count.
        assert tensor.bytes == fmt.bytes(component.shape) == record.bytes
        assert tensor.format == ("" if kind == "nf4" else fmt.name)
        formats_seen.add(fmt.name)
        with torch.no_grad():
            weight.copy_(expected)
    wanted = {
        "mixed": {"int8", "int4"},
        "unsigned": {"uint4", "uint4-g32", "nf4", "nf4-g32", "mxfp4"},
    }
    assert wanted[plan] <= formats_seen
    notes = case.artifact.settings.get("notes", [])
    expands = any("expands mxfp4 and uint2-g64" in note for note in notes)
    assert expands == (ON_ARM and plan == "unsigned")
    ids = token_ids(1, 70)
    session = open_session(case.folder, exact=True, threads=1)
    assert_same_logits(session.logits(ids[0].tolist()), reference(model, ids), 1e-4)


def test_bytes_on_disk_are_the_plans_and_a_tied_head_is_stored_once(
    tmp_path: Path,
) -> None:
    model = untouched("mamba")
    assignment = {c.name: "int8" for c in model.anatomy.candidates}
    planned = sum(
        get_format(assignment[c.name]).bytes(c.shape)
        if c.name in assignment
        else 2 * c.parameters
        for c in model.anatomy.components
    )
    artifact = export(
        model, Plan("int8", assignment, made_by="test", bytes=planned), tmp_path
    )
    files = [tmp_path / f"openvino_model.{ending}" for ending in ("xml", "bin")]
    assert artifact.realised_bytes == sum(path.stat().st_size for path in files)
    binary = files[1].stat().st_size
    # A_log of the four layers is the same in a fresh model.
    once = 3 * 2 * 128 * 8
    assert abs((binary + once) / planned - 1) < 0.01
    graph = files[0].read_text()
    numbers = [int(number) for number in re.findall(r'name="[A-Za-z]+_(\d+)"', graph)]
    assert max(numbers) < graph.count("<layer "), (
        "names count what else this process has made"
    )
    anatomy = model.anatomy
    assert anatomy.head == anatomy.embedding
    size = anatomy.component(anatomy.embedding).parameters
    stored = apart(tmp_path).values()
    large = [tensor.name for tensor in stored if math.prod(tensor.shape) == size]
    assert large == ["backbone.embeddings.weight"]


def test_equal_weights_keep_their_own_formats(tmp_path: Path) -> None:
    """Two matrices with the same numbers and different formats: told apart by name, or refused."""
    model = loaded("mamba")
    first, second = (model.model.backbone.layers[i].mixer.out_proj for i in (0, 1))
    second.weight = nn.Parameter(first.weight.clone(), requires_grad=False)
    names = [f"backbone.layers.{i}.mixer.out_proj" for i in (0, 1)]
    plan = Plan("two", {names[0]: "int4", names[1]: "int8"}, made_by="test")
    realised = {t.component: t.realised for t in export(model, plan, tmp_path).tensors}
    assert (realised[names[0]], realised[names[1]]) == ("int4", "int8")


# -- formats that OpenVINO or a shape cannot hold are refused, or visibly replaced --------------------------------


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
