"""Faults planted in OpenVINO IRs, and sound IRs of ours and of NNCF."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import KLLensError
from kl_lens.targets import dissected
from kl_lens.targets.openvino.folder import IR_FILE, WEIGHT_FILE
from kl_lens.targets.openvino.rewrites import operations
from tests.autopsy.conftest import Examine, Exported, only_fault

BLOCK = "backbone.layers.1.mixer"


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def stored(folder: Path, name: str) -> Any:
    """The bytes of a constant; what is written to them is written to the file."""
    text = (folder / IR_FILE).read_text()
    at = re.search(rf'name="{re.escape(name)}" type="Const".*?offset="(\d+)" size="(\d+)"', text, re.S)
    assert at
    return np.memmap(folder / WEIGHT_FILE, np.uint8, "r+", int(at[1]), (int(at[2]),))


def resaved(folder: Path, to: Path, change: Callable[[ov.Model], ov.Model]) -> Path:
    """The graph after a change, with everything else of its folder."""
    other = copied(folder, to)
    graph = change(ov.Core().read_model(folder / IR_FILE))
    ov.save_model(graph, other / IR_FILE, compress_to_fp16=False)
    return other


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("mamba", "int4-g64"),
        pytest.param("mamba2", "int8", marks=pytest.mark.slow),  # converting takes long
        pytest.param("hybrid", "int8", marks=pytest.mark.slow),
    ],
)
def test_sound_files(exported: Exported, examine: Examine, name: str, fmt: str) -> None:
    found = examine(exported(name, "openvino", fmt), name)
    assert not found.faults, found.faults
    assert found.headline.startswith("Nothing is wrong")
    kls = {step.letter: step.kl.value for step in found.steps if step.kl is not None}
    assert kls["e"] == pytest.approx(kls["b"], rel=0.02)  # exact settings: the weights alone
    assert {"a", "b", "d", "e", "f", "g"} <= {step.letter for step in found.steps}


def test_a_file_of_nncf(
    exported: Exported, examine: Examine, tmp_path: Path, models: Callable[[str], LoadedModel]
) -> None:
    """Without our record, in types that we do not write."""
    sound = exported("mamba", "openvino", "fp16")
    folder = resaved(sound, tmp_path, lambda graph: nncf.compress_weights(graph))
    (folder / "artifact.json").unlink()
    found = examine(folder)
    assert not found.faults, found.faults
    assert "u8" in {tensor.type for tensor in found.tensors}
    assert not [tensor.name for tensor in found.tensors if tensor.bytes > 10_000 and not tensor.component]
    assert examine(folder / IR_FILE, None).headline.startswith(
        "Nothing is wrong that the file alone could show"
    )


def test_scales_of_one_weight_halved(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    folder = copied(exported("mamba", "openvino", "int8"), tmp_path)
    scales = stored(folder, f"{BLOCK}.in_proj.weight/scale").view(np.float16)
    scales[:] = scales / 2
    only_fault(examine(folder), "weights", f"{BLOCK}.in_proj.weight", "times 0.5")


@pytest.mark.slow
def test_two_weights_swapped(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    folder = copied(exported("mamba", "openvino", "fp16"), tmp_path)
    one, two = (stored(folder, f"backbone.layers.{block}.mixer.x_proj.weight") for block in (0, 2))
    kept = one.copy()
    one[:], two[:] = two, kept
    found = examine(folder)
    only_fault(found, "weights", "backbone.layers.0.mixer.x_proj.weight and", "are swapped")


def test_a_wrong_epsilon(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    def change(graph: ov.Model) -> ov.Model:
        for node in operations(graph, "Constant"):
            small = node.get_element_type() == ov.Type.f32 and node.data.size == 1
            if small and np.isclose(float(node.data.reshape(-1)[0]), 1e-5):
                new = ops.constant(np.full(node.data.shape, 5e-3, np.float32))
                for reader in node.output(0).get_target_inputs():
                    reader.replace_source_output(new.output(0))
        return graph

    folder = resaved(exported("mamba", "openvino", "int8"), tmp_path, change)
    only_fault(examine(folder), "metadata", "epsilon of a norm is 0.005 in the file, 1e-05 in the original")


@pytest.mark.slow
def test_a_graph_that_computes_something_else(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    """The weights are right and no setting is wrong: it is the conversion, or the runtime."""

    def change(graph: ov.Model) -> ov.Model:
        gate = operations(graph, "Swish")[-1]
        other = ops.sigmoid(gate.input_value(0))
        for reader in gate.output(0).get_target_inputs():
            reader.replace_source_output(other.output(0))
        return graph

    folder = resaved(exported("mamba", "openvino", "int8"), tmp_path, change)
    only_fault(examine(folder), "runtime", "does not compute what the weights say")


def test_the_tokenizer_of_another_model(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    folder = copied(exported("mamba", "openvino", "int8"), tmp_path)
    for name in ("openvino_tokenizer.xml", "openvino_detokenizer.xml"):
        (folder / name).unlink(missing_ok=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["e"], ids["t"] = ids["t"], ids["e"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    only_fault(examine(folder), "tokenizer", "tokenizer is not the original's")


def test_what_cannot_be_opened_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / IR_FILE).write_text("<net>not a graph</net>")
    with pytest.raises(KLLensError, match=IR_FILE) as error:
        dissected(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(KLLensError, match="holds no model"):
        dissected(Path(__file__))
    with pytest.raises(KLLensError, match="no such file"):
        dissected(tmp_path / "nothing.xml")
