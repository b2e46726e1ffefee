"""NNCF with the recipe of a plan gives every constant the type that our own export gives it."""

import runpy
from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest

from kl_lens.planning.handover import write_recipe
from kl_lens.run.records import Plan
from tests.targets.openvino.conftest import Exported

pytest.importorskip("nncf", reason="needs the extra kl-lens[openvino]")


def _types(graph: ov.Model) -> dict[str, str]:
    return {
        node.get_friendly_name(): node.get_element_type().get_type_name()
        for node in graph.get_ops()
        if node.get_type_name() == "Constant"
    }


@pytest.mark.parametrize("kind", ["mixed", "unsigned"])
def test_nncf_gives_every_constant_its_type(
    kind: str, exported: Callable[..., Exported], tmp_path: Path
) -> None:
    case = exported("mamba", kind)
    original = exported("mamba")
    without = ("fp16", "fp32", "uint2-g64")  # NNCF's two bits are symmetric
    stored = {
        t.component: t.realised
        for t in case.artifact.tensors
        if t.realised not in without
    }
    recipe = write_recipe("nncf", case.model, Plan(kind, stored, "test"), tmp_path)
    compress = runpy.run_path(str(recipe.files[0]))["compress"]
    core = ov.Core()
    types = _types(compress(core.read_model(next(original.folder.glob("*.xml")))))
    wanted = _types(core.read_model(next(case.folder.glob("*.xml"))))
    checked = [t for t in case.artifact.tensors if t.component in stored]
    assert checked
    for tensor in checked:
        assert types[tensor.runtime_name] == wanted[tensor.runtime_name], tensor.component
    assert {
        types[t.runtime_name] for t in case.artifact.tensors if t.component not in stored
    } <= {
        "f32",
        "f16",
    }
