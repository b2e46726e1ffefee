"""Faults planted in GGUF files: each is blamed, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import transformers

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import KLLensError
from kl_lens.targets import dissected
from tests.autopsy import planting
from tests.autopsy.conftest import Examine, Exported, only_fault


@pytest.mark.parametrize(
    ("name", "fmt"),
    [("mamba", "q4_0"), pytest.param("mamba2", "q8_0", marks=pytest.mark.slow), ("hybrid", "q4_k")],
)
def test_sound_files(exported: Exported, examine: Examine, name: str, fmt: str) -> None:
    found = examine(exported(name, "gguf", fmt), name)
    assert not found.faults, found.faults
    assert found.headline.startswith(f"Nothing is wrong: it loses what {fmt.upper()} loses")
    assert [step.letter for step in found.steps] == list("abcdefg")
    kls = {step.letter: step.kl.value for step in found.steps if step.kl is not None}
    assert kls["a"] == 0 < kls["b"]
    assert found.rounding_kl is not None
    assert found.rounding_kl.value == pytest.approx(kls["b"], rel=1e-6)  # it is what was rounded
    assert kls["d"] == pytest.approx(kls["c"], rel=0.2)


def test_scales_of_one_tensor_halved(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path)
    planting.scale(path, "blk.1.ssm_in.weight", 0.5)
    only_fault(examine(path), "weights", "blk.1.ssm_in.weight", "times 0.5")


def test_two_tensors_swapped(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q4_0"), tmp_path)
    planting.swap(path, "blk.0.ssm_out.weight", "blk.2.ssm_out.weight")
    only_fault(examine(path), "weights", "blk.0.ssm_out.weight and blk.2.ssm_out.weight are swapped")


def test_a_wrong_epsilon(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path)
    planting.set_number(path, "mamba.attention.layer_norm_rms_epsilon", 1e-2)
    only_fault(examine(path), "metadata", "epsilon is 0.01 in the file, 1e-05 in the original")


def test_gates_in_two_bits(exported: Exported, examine: Examine) -> None:
    found = examine(exported("hybrid", "gguf", "q8_0", {"gate_proj": "q2_k"}), "hybrid")
    only_fault(found, "type", "all gate_proj (Q2_K)", "2.6 bits where most of the file has 8.5")


def test_the_tokenizer_of_another_model(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    source = exported("mamba", "gguf", "q8_0")
    tokens = list(gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents())
    other = [tokens[0], *reversed(tokens[1:])]
    path = planting.rewritten(source, tmp_path, {"tokenizer.ggml.tokens": other})
    only_fault(examine(path), "tokenizer", "tokenizer is not the original's")


def test_a_convolution_in_four_bits(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path, name = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path), "blk.0.ssm_conv1d.weight"
    planting.retyped(path, name, gguf.GGMLQuantizationType.Q4_0)
    found = examine(path)
    only_fault(found, "type", name, "Q4_0", "conv1d in floating point")
    assert any(
        "llama.cpp does not run it" in f.words for f in found.findings
    )  # and says so, but blames the type


def test_an_embedding_whose_end_is_missing(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path)
    rows = planting.stored(path, "token_embd.weight").reshape(4096, -1)
    rows[3000:] = 0
    only_fault(examine(path), "weights", "token_embd.weight", "rows that are zero (from row 3,000 on)")


@pytest.mark.slow
def test_an_embedding_with_fewer_rows(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    source, name = exported("mamba", "gguf", "fp16"), "token_embd.weight"
    values = (
        planting.stored(planting.copied(source, tmp_path), name).view(np.float16).reshape(4096, -1)[:3000]
    )
    kept = np.array(values)
    (tmp_path / source.name).unlink()
    path = planting.rewritten(source, tmp_path, tensors={name: (kept, gguf.GGMLQuantizationType.F16)})
    only_fault(examine(path), "weights", name, "has the shape 3000×256, not 4096×256")


@pytest.mark.slow
def test_activations_that_eight_bits_cannot_hold(
    exported: Exported, examine: Examine, with_outliers: Callable[[float], LoadedModel]
) -> None:
    model = with_outliers(3e4)
    sound = examine(exported(model, "gguf", "fp16"), model)
    assert not sound.faults, sound.faults
    found = examine(exported(model, "gguf", "q8_0"), model)
    only_fault(found, "activations", "do not survive rounding", "all out_proj (Q8_0)")


def test_activations_that_overflow(
    exported: Exported, examine: Examine, with_outliers: Callable[[float], LoadedModel]
) -> None:
    """The scale of a block is stored in half precision."""
    model = with_outliers(1e9)
    found = examine(exported(model, "gguf", "q8_0"), model)
    only_fault(found, "activations", "overflow", "all out_proj (Q8_0)")


def test_a_layer_of_noise(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "fp16"), tmp_path)
    noise = np.random.default_rng(0)
    for part in ("ssm_in", "ssm_x", "ssm_dt", "ssm_out"):
        planting.change(
            path, f"blk.1.{part}.weight", np.float16,
            lambda v: v + 0.5 * v.astype(np.float32).std() * noise.standard_normal(v.shape),
        )  # fmt: skip
    only_fault(examine(path), "weights", "Block 1 is damaged")


# -- faults of our own -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_rope_base(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("hybrid", "gguf", "q8_0"), tmp_path)
    planting.set_number(path, "rope.freq_base", 500.0)
    only_fault(examine(path, "hybrid"), "metadata", "rope.freq_base is 500 in the file")


def test_decays_of_the_wrong_sign(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path)
    planting.change(path, "blk.2.ssm_a", np.float32, lambda values: -values)
    only_fault(examine(path), "weights", "blk.2.ssm_a", "times -1")


@pytest.mark.slow
def test_a_transposed_matrix(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "fp16"), tmp_path)
    planting.change(path, "blk.1.ssm_out.weight", np.float16, lambda v: v.reshape(256, 512).T.reshape(-1))
    only_fault(examine(path), "weights", "blk.1.ssm_out.weight", "is transposed")


@pytest.mark.slow
def test_heads_in_another_order(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    """As after a conversion that forgets, or repeats, the reordering for rotary embeddings."""
    path = planting.copied(exported("hybrid", "gguf", "fp16"), tmp_path)
    name = "blk.1.attn_q.weight"
    planting.change(path, name, np.float16, lambda v: v.reshape(-1, 2, 256).transpose(1, 0, 2).reshape(-1))
    only_fault(examine(path, "hybrid"), "weights", name, "rows in another order")


@pytest.mark.slow
def test_a_special_token_that_is_plain_text(
    exported: Exported, examine: Examine, models: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    content = json.loads(models("mamba").tokenizer.backend_tokenizer.to_str())
    old = next(text for text, index in content["model"]["vocab"].items() if index == 4095)
    del content["model"]["vocab"][old]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != old]
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 4095, "content": "<|user|>"})
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)), eos_token="<|endoftext|>"
    )
    model = dataclasses.replace(models("mamba"), tokenizer=tokenizer)
    source = exported(model, "gguf", "q8_0")
    assert not examine(source, model).faults
    types = list(gguf.GGUFReader(source).fields["tokenizer.ggml.token_type"].contents())
    assert types[4095] == 3
    path = planting.rewritten(source, tmp_path, {"tokenizer.ggml.token_type": [*types[:4095], 1]})
    only_fault(examine(path, model), "tokenizer", "tokenizer is not the original's", "<|user|>")


@pytest.mark.slow
def test_another_end_of_text(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.rewritten(
        exported("mamba", "gguf", "q8_0"), tmp_path, {"tokenizer.ggml.eos_token_id": 17}
    )
    only_fault(examine(path), "tokenizer", "eos_token_id is 17 in the file, 0 in the original")


def test_a_missing_tensor(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.rewritten(exported("mamba", "gguf", "q8_0"), tmp_path, tensors={"blk.1.ssm_d": None})
    only_fault(examine(path), "weights", "Tensors of the original are missing: blk.1.ssm_d")


def test_scales_that_are_not_finite(exported: Exported, examine: Examine, tmp_path: Path) -> None:
    path = planting.copied(exported("mamba", "gguf", "q8_0"), tmp_path)
    planting.stored(path, "blk.2.ssm_x.weight")[:2] = np.array([np.inf], np.float16).view(np.uint8)
    only_fault(examine(path), "weights", "blk.2.ssm_x.weight", "not finite")
    alone = examine(path, None)
    only_fault(alone, "weights", "blk.2.ssm_x.weight", "not finite")


@pytest.mark.slow
def test_the_wrong_original(exported: Exported, examine: Examine) -> None:
    found = examine(exported("mamba", "gguf", "q8_0"), "mamba2")
    assert found.faults
    assert "general.architecture is mamba in the file, mamba2 in the original" in str(found.faults)


def test_a_file_alone(exported: Exported, examine: Examine) -> None:
    found = examine(exported("mamba", "gguf", "q4_0"), None)
    assert not found.faults
    assert found.headline.startswith("Nothing is wrong that the file alone could show")
    assert {step.letter for step in found.steps} == {"d", "f"}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to be one"])
def test_what_cannot_be_opened_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(KLLensError, match=r"x\.gguf") as error:
        dissected(path)
    assert "\n" not in str(error.value)
