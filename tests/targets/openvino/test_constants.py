"""The integers on disk are those of kl_lens.weights.formats, each component exactly once."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Plan
from kl_lens.targets import describe_target
from kl_lens.targets.openvino import constants, export, open_session
from kl_lens.targets.openvino.graph import build_graph
from kl_lens.targets.openvino.session import read_graph
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.zero_points import ZeroPointFormat
from tests.families import token_ids
from tests.targets.openvino.conftest import assert_same_logits, loaded, reference, untouched

QUICK = ["mamba", "jamba_experts"]
SLOW = ["falcon_mamba", "mamba2", "falcon_h1", "zamba2", "bamba", "nemotron_h", "granitemoehybrid"]
SLOW += ["hymba", "zamba", "lfm2", "qwen3_next", "kimi_linear", "minimax", "rwkv"]
plans = pytest.mark.parametrize(
    ("family", "plan"),
    [
        *((name, "mixed") for name in QUICK),
        ("mamba", "unsigned"),
        *(pytest.param(name, "mixed", marks=pytest.mark.slow) for name in SLOW),
        pytest.param("jamba_experts", "unsigned", marks=pytest.mark.slow),
    ],
)
ELEMENTS = {"int8": "i8", "int4": "i4", "uint4": "u4", "nf4": "nf4", "uint2": "u2", "mxfp4": "f4e2m1"}


@plans
def test_saved_integers_and_scales_are_those_of_the_formats(
    family: str, plan: str, exported: Callable
) -> None:
    case = exported(family, plan)
    stored = constants.read_back(read_graph(case.folder / "openvino_model.xml"))
    anatomy = case.model.anatomy
    seen = set()
    held = {tensor.component: tensor.runtime_name for tensor in case.artifact.tensors}
    assert {c.name: c.weight for c in anatomy.candidates}.items() <= held.items()
    names = [t.runtime_name for t in case.artifact.tensors if t.realised != "fp32"]
    assert len(names) == len(set(names))
    for tensor in case.artifact.tensors:
        component = anatomy.component(tensor.component)
        element, data, scales = stored[tensor.runtime_name]
        if tensor.realised == "fp32":
            assert element == "f32"
            continue
        fmt = get_format(tensor.realised)
        quantized = fmt.quantize(case.model.model.get_parameter(component.weight))
        assert element == ELEMENTS[fmt.name.partition("-")[0]]
        np.testing.assert_array_equal(data, fmt.pack(quantized))
        np.testing.assert_array_equal(scales.reshape(-1), quantized.scales.numpy().reshape(-1))
        zero_points = np.empty(0, np.uint8)
        if isinstance(fmt, ZeroPointFormat):
            element, zero_points, _ = stored[f"{tensor.runtime_name}/zero_point"]
            assert element == ELEMENTS[fmt.name.partition("-")[0]]
            np.testing.assert_array_equal(zero_points, fmt.pack_zero_points(quantized))
        # Four bits really take half a byte: integers, scales and zero points are the format's own count.
        size = data.nbytes + scales.nbytes + zero_points.nbytes
        assert size == fmt.bytes(component.shape) == tensor.bytes
        seen.add(fmt.name)
    wanted = {"mixed": {"int8", "int4"}, "unsigned": {"uint4", "uint4-g32", "nf4", "nf4-g32", "mxfp4"}}
    assert wanted[plan] <= seen


def test_a_file_taken_apart_gives_the_same_values(exported: Callable) -> None:
    case = exported("mamba", "unsigned")
    apart = {tensor.name: tensor for tensor in describe_target("openvino").dissect(case.folder).tensors}
    for tensor in case.artifact.tensors:
        if tensor.realised in ("uint2-g64", "mxfp4", "uint4-g32"):
            weight = case.model.model.get_parameter(case.model.anatomy.component(tensor.component).weight)
            found = apart.pop(tensor.runtime_name)
            assert torch.equal(
                found.read().reshape(weight.shape), get_format(tensor.realised).roundtrip(weight)
            )
            assert (found.format, found.bytes) == (tensor.realised, tensor.bytes)


def test_small_formats_say_what_this_processor_does_with_them(exported: Callable) -> None:
    notes = exported("mamba", "unsigned").artifact.settings.get("notes", [])
    assert any("expands mxfp4 and uint2-g64" in note for note in notes) == (
        platform.machine() in ("aarch64", "arm64")
    )


@plans
def test_the_runtime_computes_with_what_was_planned(family: str, plan: str, exported: Callable) -> None:
    case = exported(family, plan)
    ids = token_ids(1, 70)
    model = loaded(family).model
    with torch.no_grad():
        for tensor in case.artifact.tensors:
            if tensor.realised != "fp32":
                weight = model.get_parameter(case.model.anatomy.component(tensor.component).weight)
                weight.copy_(get_format(tensor.realised).roundtrip(weight))
    session = open_session(case.folder, exact=True, threads=1)
    assert_same_logits(session.logits(ids[0].tolist()), reference(model, ids), 1e-4)


def test_what_must_not_be_quantized_is_not(exported: Callable) -> None:
    case = exported("mamba", "mixed")
    realised = {t.component: t.realised for t in case.artifact.tensors}
    for component in case.model.anatomy.components:
        if not component.quantizable and component.name in realised:
            assert realised[component.name] == "fp32"
    with pytest.raises(TargetError, match=r"conv1d is planned as int8, but must stay.*convolution"):
        export(
            case.model, Plan("bad", {"backbone.layers.0.mixer.conv1d": "int8"}, made_by="test"), case.folder
        )


def test_a_tied_head_is_stored_once(exported: Callable) -> None:
    case = exported("mamba", "mixed")
    anatomy = case.model.anatomy
    assert anatomy.head == anatomy.embedding
    stored = constants.read_back(read_graph(case.folder / "openvino_model.xml"))
    rows, columns = anatomy.component(anatomy.embedding).shape
    large = [name for name, (_, data, _) in stored.items() if data.nbytes * 2 == rows * columns]
    assert large == ["backbone.embeddings.weight"]


def test_bytes_on_disk_are_the_plans(tmp_path) -> None:
    model = untouched("mamba")
    assignment = {c.name: "int8" for c in model.anatomy.candidates}
    planned = sum(
        get_format(assignment[c.name]).bytes(c.shape) if c.name in assignment else 2 * c.parameters
        for c in model.anatomy.components
    )
    artifact = export(model, Plan("int8", assignment, made_by="test", bytes=planned), tmp_path)
    files = [tmp_path / f"openvino_model.{ending}" for ending in ("xml", "bin")]
    assert artifact.realised_bytes == sum(path.stat().st_size for path in files)
    binary = (tmp_path / "openvino_model.bin").stat().st_size
    once = artifact.settings["bytes_stored_once"]  # A_log of the four layers is the same in a fresh model
    assert once == 3 * 2 * 128 * 8
    assert abs((binary + once) / planned - 1) < 0.01
    assert artifact.settings["bytes_over_plan"] == pytest.approx((binary + once) / planned - 1)
    graph = (tmp_path / "openvino_model.xml").read_text()
    numbers = [int(number) for number in re.findall(r'name="[A-Za-z]+_(\d+)"', graph)]
    assert max(numbers) < graph.count("<layer "), "names count what else this process has made"


def test_fp16_is_rounded_to_nearest(exported: Callable) -> None:
    case = exported("mamba", unplanned="fp16")
    stored = constants.read_back(read_graph(case.folder / "openvino_model.xml"))
    for component in case.model.anatomy.candidates:
        element, data, _ = stored[component.weight]
        expected = case.model.model.get_parameter(component.weight).half().numpy()
        assert element == "f16"
        np.testing.assert_array_equal(data, expected.reshape(-1).view(np.uint8))


def test_weights_that_cannot_be_found_are_listed() -> None:
    model = loaded("mamba")
    graph = build_graph(model.model)
    anatomy = model.anatomy
    projection = model.model.backbone.layers[1].mixer.in_proj
    projection.weight = nn.Parameter(projection.weight + 0.001)  # not in place: the graph shares that memory
    with pytest.raises(TargetError) as problem:
        constants.map_weights(graph, model.model, anatomy)
    message = str(problem.value)
    assert "without a constant: backbone.layers.1.mixer.in_proj;" in message
    assert "self.model.backbone.layers.1.mixer.in_proj.weight [256, 64]" in message


def test_a_file_that_was_changed_is_noticed(exported: Callable, tmp_path) -> None:
    case = exported("mamba", "mixed")
    placed = {
        t.component: constants.Placed(t.component, t.runtime_name, t.realised, t.bytes, "0" * 32, "")
        for t in case.artifact.tensors[:1]
    }
    with pytest.raises(TargetError, match="holds other numbers than planned"):
        constants.check_saved(read_graph(case.folder / "openvino_model.xml"), placed)
    shutil.copy(case.folder / "openvino_model.xml", tmp_path / "openvino_model.xml")
    (tmp_path / "openvino_model.xml").write_text("<net>")
    with pytest.raises(TargetError, match="cannot be read by OpenVINO"):
        read_graph(tmp_path / "openvino_model.xml")


def test_equal_weights_keep_their_own_formats(tmp_path) -> None:
    """Two matrices with the same numbers and different formats: told apart by name, or refused."""
    model = loaded("mamba")
    first, second = (model.model.backbone.layers[i].mixer.out_proj for i in (0, 1))
    second.weight = nn.Parameter(first.weight.clone(), requires_grad=False)
    names = [f"backbone.layers.{i}.mixer.out_proj" for i in (0, 1)]
    plan = Plan("two", {names[0]: "int4", names[1]: "int8"}, made_by="test")
    artifact = export(model, plan, tmp_path)
    realised = {t.component: t.realised for t in artifact.tensors}
    assert (realised[names[0]], realised[names[1]]) == ("int4", "int8")
