"""Checkpoint folders with one thing changed: a value of the configuration, the index, the weights' file, the tokenizer;
plans, published files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kl_lens.cli.main import main
from kl_lens.planning import plan_path
from tests.families import tiny_model
from tests.hostile.saying import cases, says_one_line
from tests.reporting.sample import make_run

ODD: list[Any] = [None, "abc", -1, 0, 1.5, 10**12, float("nan"), [], {}, True, "\x1b[31m", [[]]]
KEYS = [
    "hidden_size", "num_hidden_layers", "vocab_size", "state_size", "expand", "conv_kernel", "time_step_rank",
    "hidden_act", "layer_norm_epsilon", "model_type", "architectures", "torch_dtype", "auto_map", "tie_word_embeddings",
]  # fmt: skip


def changed_within(content: Any, draw: random.Random) -> Any:
    """A copy with another value at some place, however deep."""
    if isinstance(content, dict) and content and draw.random() < 0.8:
        key = draw.choice(sorted(content))
        return content | {key: changed_within(content[key], draw)}
    if isinstance(content, list) and content and draw.random() < 0.8:
        at = draw.randrange(len(content))
        return [*content[:at], changed_within(content[at], draw), *content[at + 1 :]]
    return draw.choice(ODD)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "mamba"
    tiny_model("mamba").save_pretrained(folder)
    return folder


@cases(12, 700)
def test_changed_configurations(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    known = json.loads((healthy / "config.json").read_text())
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    for _ in range(cases):
        (folder / "config.json").write_text(json.dumps(known | {draw.choice(KEYS): draw.choice(ODD)}))
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 5000, "\x00", '{"model_type": "mamba"}'])
def test_files_that_are_not_configurations(content: str, healthy: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    (folder / "config.json").write_text(content)
    says_one_line(["inspect", str(folder)], capsys)


INDEXES: list[Any] = [
    {},
    [],
    {"weight_map": []},
    {"weight_map": {"a": 5}},
    {"weight_map": {"a": "../outside.safetensors"}},
    {"weight_map": {"a": "/etc/passwd"}},
    {"weight_map": {"a": "missing.safetensors"}},
]


@pytest.mark.parametrize("index", INDEXES, ids=json.dumps)
def test_indexes_that_make_no_sense(index: Any, healthy: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for words in (["inspect", str(folder)], ["export", str(folder), "--target", "gguf", "--format", "q8_0"]):
        says_one_line([*words, "--out", str(tmp_path / "out")] if words[0] == "export" else words, capsys)


@cases(4, 300)
def test_changed_indexes(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with safe_open(folder / "part.safetensors", framework="numpy") as file:
        places = dict.fromkeys(file.keys(), "part.safetensors")
    for _ in range(cases):
        content = changed_within({"metadata": {"total_size": 5}, "weight_map": places}, draw)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


def test_links_to_elsewhere_are_not_followed(healthy: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    for place, word in ((tmp_path / "elsewhere", "outside its folder"), (tmp_path / "blobs", "")):
        place.mkdir()
        shutil.copy(healthy / "model.safetensors", place / "weights")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(place / "weights")
        assert word in says_one_line(["inspect", str(folder)], capsys, may_succeed=not word)


def test_a_checkpoint_that_config_does_not_describe_is_not_exported(
    healthy: Path, tmp_path: Path, capsys
) -> None:
    """Streaming looks at one tensor at a time, and asks the same questions as opening the model."""
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    known = json.loads((folder / "config.json").read_text())
    for change in ({"vocab_size": -1}, {"vocab_size": 5}, {"num_hidden_layers": 2}, {"state_size": 3}):
        (folder / "config.json").write_text(json.dumps(known | change))
        for words in (
            ["inspect"],
            ["export", "--target", "gguf", "--format", "q8_0", "--out", str(tmp_path / "out")],
        ):
            says_one_line([words[0], str(folder), *words[1:]], capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_with_code_of_its_own_is_refused_by_its_family(
    remote_code_folder: Path, tmp_path: Path, capsys
) -> None:
    for target, reason in {
        "openvino": "cannot be exported to OpenVINO",
        "gguf": "llama.cpp has no parallel_heads architecture",
    }.items():
        words = [
            "--trust-remote-code",
            "--target",
            target,
            "--format",
            "fp16",
            "--out",
            str(tmp_path / "out"),
        ]
        assert reason in says_one_line(["export", str(remote_code_folder), *words], capsys)


@cases(6, 300)
def test_changed_tokenizers(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "normalizer": None, "pre_tokenizer": bytes_, "post_processor": None, "decoder": bytes_,
        "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    }  # fmt: skip
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    assert main(["inspect", str(healthy), "--tokenizer", str(file)]) == 0
    for _ in range(cases):
        file.write_text(json.dumps(changed_within(content, draw)))
        says_one_line(["inspect", str(healthy), "--tokenizer", str(file)], capsys, may_succeed=True)


@cases(5, 300)
def test_changed_published_files(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    run = tmp_path / "run"
    file = tmp_path / "published.json"
    entry = {"kl_teacher_to_student": 0.1, "sqnr_db": 30.0, "delta_cross_entropy": 0.2}
    layers = {
        f"backbone.layers.{n}.mixer.{kind}": entry for n in range(4) for kind in ("in_proj", "out_proj")
    }
    words = ["import-legacy", "--model", str(healthy), "--bits", "4", str(file), "--run", str(run)]
    file.write_text(json.dumps(layers))
    assert main(words) == 0
    shutil.rmtree(run)
    for _ in range(cases):
        file.write_text(json.dumps(changed_within(draw.choice([layers, list(layers.items())]), draw)))
        says_one_line(words, capsys, may_succeed=True)
        shutil.rmtree(run, ignore_errors=True)


@cases(15, 2500)
def test_changed_weight_files(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    data = (healthy / "model.safetensors").read_bytes()
    for _ in range(cases):
        changed = bytearray(data[: draw.choice([len(data), draw.randrange(len(data))])])
        if len(changed):
            changed[draw.randrange(min(1000, len(changed)))] = draw.randrange(256)
        (folder / "model.safetensors").write_bytes(changed)
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


@cases(12, 900)
def test_changed_plans(cases: int, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    run = make_run(tmp_path / "run", stages=("plan",))
    path = plan_path(run / "plans", sorted(p.stem for p in (run / "plans").glob("*.json"))[0])
    healthy = json.loads(path.read_text())
    for _ in range(cases):
        changed: Any = healthy | {draw.choice(sorted(healthy)): draw.choice(ODD)}
        if draw.random() < 0.3:
            names = dict(healthy["assignment"])
            names[draw.choice([*names, "nowhere", "../x"])] = draw.choice(ODD)
            changed = healthy | {"assignment": names}
        path.write_text(json.dumps(changed))
        export = ["export", "--run", str(run), "--target", "gguf", "--plan", path.stem]
        words = draw.choice([["report", "--run", str(run)], *[export] * 5])
        says_one_line(words, capsys, may_succeed=True)
