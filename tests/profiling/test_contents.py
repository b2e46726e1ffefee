"""What one token reads, counted in real exports of tiny models and compared with their configuration."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.base.errors import TargetError
from kl_lens.model import LoadedModel
from kl_lens.profiling.benchmark import read_timed
from kl_lens.run.records import Plan
from kl_lens.targets import export, read_artifact, target_of
from kl_lens.targets.abilities import Contents
from tests.families import VOCABULARY, tiny_model

pytest.importorskip("openvino", reason="needs the extra openvino")
pytest.importorskip("gguf", reason="needs the extra gguf")


def read_contents(path: Path) -> Contents:
    return target_of(path).contents(path)


def stored_bytes(path: Path) -> int:
    return sum(
        {
            tensor.runtime_name: tensor.bytes for tensor in read_artifact(path).tensors
        }.values()
    )


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
        assignment = (
            {} if fmt == "fp16" else {c.name: fmt for c in model.anatomy.candidates}
        )
        folder = tmp_path_factory.mktemp(f"{family}-{target}-{fmt}")
        export(model, Plan(fmt, assignment, "test"), target, folder)
        return folder

    return make


@pytest.mark.parametrize(("target", "fmt"), [("openvino", "fp16"), ("gguf", "q8_0")])
def test_mamba_with_a_tied_head(target: str, fmt: str, exported: Exported) -> None:
    path = exported("mamba", target, fmt)
    config = opened("mamba").config
    contents = read_contents(path)
    # Four layers, inner size 128, eight states, a convolution of four: all in float32.
    assert contents.state_bytes == 4 * 4 * (
        128 * config.state_size + 128 * (config.conv_kernel - 1)
    )
    assert contents.kv_bytes_per_position == 0
    assert contents.weight_bytes == stored_bytes(
        path
    )  # tied: all of the embedding is read, at its size on disk


@pytest.mark.parametrize("target", ["openvino", "gguf"])
def test_attention_experts_and_a_head_of_its_own(target: str, exported: Exported) -> None:
    model = opened("jamba_experts")
    contents = read_contents(exported("jamba_experts", target))
    # Two attention layers with two heads of 16 for keys and as many for values, in F16.
    assert contents.kv_bytes_per_position == 2 * 2 * (2 * 16) * 2
    whole = stored_bytes(exported("jamba_experts", target))
    unread = 2 * 64 * (VOCABULARY - 1)  # of the embedding, all rows but one
    if (
        target == "gguf"
    ):  # llama.cpp multiplies with two of the four experts; the exported graph with all
        experts = [
            c for c in model.anatomy.components if len(c.shape) == 3 and c.quantizable
        ]
        unread += sum(2 * c.parameters for c in experts) / 2
    assert contents.weight_bytes == pytest.approx(whole - unread)


def test_which_artifact_stands_for_fp16_and_which_is_damaged(
    exported: Exported, tmp_path: Path
) -> None:
    shutil.copytree(exported("mamba", "gguf", "q8_0"), tmp_path / "q8_0")
    assert read_timed(exported("mamba", "openvino")).is_fp16
    (file,) = (tmp_path / "q8_0").glob("*.gguf")
    assert not read_timed(tmp_path / "q8_0").is_fp16
    assert not read_timed(file).is_fp16
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(TargetError, match="was changed after the export"):
        read_timed(tmp_path / "q8_0")
