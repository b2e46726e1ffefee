"""Heads for further tokens (`mtp.*`) of a checkpoint: kept where a runtime has a place for them, named where not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets import SessionSettings, get_target
from kl_lens.targets.registry import describe_target
from kl_lens.weights.formats import get_format
from tests.families import tiny_model

PLAN = Plan("p", {}, "test")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Qwen3.5 without and with a head as published ones have it: a block, a projection and three norms."""
    plain, headed = (tmp_path_factory.mktemp(name) for name in ("plain", "headed"))
    for folder in (plain, headed):
        tiny_model("qwen3_5_text").save_pretrained(folder)
    tensors = load_file(headed / "model.safetensors")
    attention = "model.layers.1."  # a block with attention
    block = {
        n.replace(attention, "mtp.layers.0."): t.clone()
        for n, t in tensors.items()
        if n.startswith(attention)
    }
    norms = {
        f"mtp.{name}.weight": torch.rand(96)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    save_file(
        tensors | block | norms | {"mtp.fc.weight": torch.randn(96, 192)},
        headed / "model.safetensors",
    )
    return plain, headed


def logits(target: str, folder: Path) -> np.ndarray:
    session = get_target(target).open(folder, SessionSettings(threads=1))
    try:
        return session.logits(IDS)
    finally:
        session.close()


def test_llama_cpp_gets_them_in_8_bits(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra gguf")
    from kl_lens.targets.gguf.header import read_header

    target = get_target("gguf")
    sizes = []
    for name, source in zip(("plain", "headed"), folders, strict=True):
        model = load(source)
        artifact = target.export(model, PLAN, tmp_path / name)
        assert target.file_bytes(model, PLAN) == artifact.realised_bytes
        sizes.append(artifact.realised_bytes)
    assert not any("left out" in note for note in artifact.settings["notes"])
    header = read_header(target.loaded_files(tmp_path / "headed")[0])
    stored = {
        entry.name: entry for entry in header.tensors if entry.name.startswith("blk.4.")
    }
    assert header.metadata["qwen35.nextn_predict_layers"] == 1
    assert stored["blk.4.nextn.eh_proj.weight"].type == "Q8_0"
    assert stored["blk.4.attn_q.weight"].type == "Q8_0"
    assert stored["blk.4.nextn.shared_head_norm.weight"].type == "F32"
    assert (
        sizes[1] - sizes[0] >= sum(entry.bytes for entry in stored.values()) > 0
    )  # counted in the size
    assert np.array_equal(
        logits("gguf", tmp_path / "plain"), logits("gguf", tmp_path / "headed")
    )


@pytest.mark.parametrize("name", ["compressed-tensors", "vllm", "vllm-cpu"])
def test_transformers_and_vllm_get_them_in_8_bits_where_a_kernel_has_them(
    name: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra compressed")
    target = get_target(name)
    eight = get_format("int8")
    for name_of_folder, source in zip(("plain", "headed"), folders, strict=True):
        artifact = target.export(model := load(source), PLAN, tmp_path / name_of_folder)
        with monkeypatch.context() as unread:
            unread.setattr(
                "kl_lens.targets.compressed_tensors.export.read_stored",
                lambda stored: pytest.fail(f"{stored.name} was read"),
            )
            assert (
                target.file_bytes(model, PLAN) == artifact.realised_bytes
            )  # from shapes alone
    assert not any("left out" in note for note in artifact.settings["notes"])
    heads = {
        n: t
        for n, t in load_file(folders[1] / "model.safetensors").items()
        if n.startswith("mtp.")
    }
    matrices = {
        n.removesuffix(".weight") for n, tensor in heads.items() if tensor.dim() > 1
    }
    assert (len(heads), len(matrices)) == (15, 8)
    stored = {
        tensor.name: tensor for tensor in target.dissect(tmp_path / "headed").tensors
    }
    packs = name != "vllm-cpu"
    for head, tensor in heads.items():
        if tensor.dim() > 1:
            tensor = eight.roundtrip(tensor) if packs else tensor.half().float()
        assert torch.equal(stored[head].read(), tensor), head
    bits = {
        tensor.realised
        for tensor in artifact.tensors
        if tensor.component.removesuffix(".weight") in matrices
    }
    assert bits == {"int8" if packs else "fp16"}
    assert np.array_equal(
        logits(name, tmp_path / "plain"), logits(name, tmp_path / "headed")
    )


@pytest.mark.parametrize("target", ["openvino", "mlx"])
def test_where_there_is_no_place_export_says_so(
    target: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    if describe_target(target).lacks():
        pytest.skip(f"needs the extra {target}")
    family = tiny_model("qwen3_next" if target == "mlx" else "qwen3_5_text")
    family.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        tensors | {"mtp.fc.weight": torch.randn(64, 128)},
        tmp_path / "model" / "model.safetensors",
    )
    artifact = get_target(target).export(load(tmp_path / "model"), PLAN, tmp_path / "out")
    assert any(
        "left out: heads for further tokens (1 tensors mtp.*)" in n
        for n in artifact.settings["notes"]
    )
