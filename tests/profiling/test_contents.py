"""What one token reads, counted in real exports of tiny models and compared with their configuration."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.base.errors import TargetError
from kl_lens.model import LoadedModel
from kl_lens.profiling.subjects import read_timed
from kl_lens.run.records import Plan
from kl_lens.targets import export, target_of
from kl_lens.targets.contents import BODY, HEAD, LOOKUP, Contents
from kl_lens.weights.formats import get_format
from tests.families import VOCABULARY, tiny_model

pytest.importorskip("openvino", reason="needs the extra openvino")
pytest.importorskip("gguf", reason="needs the extra gguf")


def read_contents(place: Path) -> Contents:
    return target_of(place).contents(place)


Exported = Callable[..., Path]


@functools.cache
def opened(family: str) -> LoadedModel:
    return LoadedModel(family, Path(), tiny_model(family), None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """exported(family, target, format): a folder that all tests share."""

    @functools.cache
    def make(family: str, target: str, fmt: str = "fp16") -> Path:
        model = opened(family)
        assignment = {} if fmt == "fp16" else {c.name: fmt for c in model.anatomy.candidates}
        folder = tmp_path_factory.mktemp(f"{family}-{target}-{fmt}")
        export(model, Plan(fmt, assignment, "test"), target, folder)
        return folder

    return make


@pytest.mark.parametrize("target", ["openvino", "gguf"])
def test_mamba_with_a_tied_head(target: str, exported: Exported) -> None:
    model, contents = opened("mamba"), read_contents(exported("mamba", target))
    config = model.config
    # Four layers, inner size 128, eight states, a convolution of four: all in float32.
    assert contents.state_bytes == 4 * 4 * (128 * config.state_size + 128 * (config.conv_kernel - 1))
    assert contents.kv_bytes_per_position == 0
    (head,) = [w for w in contents.weights if w.role == HEAD]
    assert (head.parameters, head.share, head.bytes) == (VOCABULARY * 64, 1.0, 2 * VOCABULARY * 64)
    assert not [w for w in contents.weights if w.role == LOOKUP]  # tied: the head reads all of it
    assert contents.weight_bytes_per_token == sum(w.bytes for w in contents.weights)
    if target == "gguf":
        assert contents.body_parameters + contents.head_parameters == model.anatomy.parameters


@pytest.mark.parametrize("target", ["openvino", "gguf"])
def test_attention_experts_and_a_head_of_its_own(target: str, exported: Exported) -> None:
    model, contents = opened("jamba_experts"), read_contents(exported("jamba_experts", target))
    # Two attention layers with two heads of 16 for keys and as many for values, in F16.
    assert contents.kv_bytes_per_position == 2 * 2 * (2 * 16) * 2
    (lookup,) = [w for w in contents.weights if w.role == LOOKUP]
    assert lookup.bytes * lookup.share == 2 * 64  # one row
    (head,) = [w for w in contents.weights if w.role == HEAD]
    assert head.parameters == VOCABULARY * 64
    partial = [w for w in contents.weights if w.role == BODY and w.share < 1]
    experts = [c for c in model.anatomy.components if len(c.shape) == 3 and c.quantizable]
    if target == "gguf":  # llama.cpp multiplies with two of the four experts
        assert {w.share for w in partial} == {2 / 4}
        assert sum(w.parameters for w in partial) == sum(c.parameters for c in experts)
    else:  # the exported graph with all of them
        assert not partial
        assert contents.body_parameters >= sum(c.parameters for c in experts)


def test_quantized_weights_count_at_their_size_on_disk(exported: Exported) -> None:
    folders = [exported("mamba", "openvino", fmt) for fmt in ("fp16", "int8")]
    half, eighth = map(read_contents, folders)
    saved = half.weight_bytes_per_token - eighth.weight_bytes_per_token
    binaries = [timed.target.weight_file(timed.path).stat().st_size for timed in map(read_timed, folders)]
    sizes = binaries[0] - binaries[1]
    assert saved == pytest.approx(sizes, rel=0.02)  # what else is in the files is the same in both
    assert half.head_parameters == eighth.head_parameters


def test_a_head_with_zero_points(tmp_path: Path) -> None:
    model = opened("mamba")
    export(model, Plan("two", {model.anatomy.head: "uint2-g64"}, "test"), "openvino", tmp_path / "two")
    (head,) = [w for w in read_contents(tmp_path / "two").weights if w.role == HEAD]
    assert head.bytes == get_format("uint2-g64").bytes((VOCABULARY, 64))


def test_which_artifact_stands_for_fp16_and_which_is_damaged(exported: Exported, tmp_path: Path) -> None:
    shutil.copytree(exported("mamba", "openvino"), tmp_path / "fp16")
    shutil.copytree(exported("mamba", "gguf", "q8_0"), tmp_path / "q8_0")
    assert read_timed(tmp_path / "fp16").is_fp16
    (file,) = (tmp_path / "q8_0").glob("*.gguf")
    assert not read_timed(tmp_path / "q8_0").is_fp16
    assert not read_timed(file).is_fp16
    with file.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(TargetError, match="was changed after the export"):
        read_timed(tmp_path / "q8_0")
    (tmp_path / "fp16/openvino_model.bin").unlink()
    with pytest.raises(TargetError, match=r"openvino_model\.bin is missing"):
        read_timed(tmp_path / "fp16")
