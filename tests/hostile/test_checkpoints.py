"""Checkpoint folders with one thing changed: a value of the configuration, the index, the weights' file, a plan."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kl_lens.planning import plan_path
from tests.families import tiny_model
from tests.hostile.saying import says_one_line
from tests.reporting.sample import make_run

ODD: list[Any] = [None, "abc", -1, 0, 1.5, 10**12, float("nan"), [], {}, True, "\x1b[31m", [[]]]
KEYS = [
    "hidden_size", "num_hidden_layers", "vocab_size", "state_size", "expand", "conv_kernel", "time_step_rank",
    "hidden_act", "layer_norm_epsilon", "model_type", "architectures", "torch_dtype", "auto_map", "tie_word_embeddings",
]  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "mamba"
    tiny_model("mamba").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.slow)])
def test_changed_configurations(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    known = json.loads((healthy / "config.json").read_text())
    folder = tmp_path / "model"
    shutil.copytree(healthy, folder)
    for _ in range(cases):
        (folder / "config.json").write_text(json.dumps(known | {draw.choice(KEYS): draw.choice(ODD)}))
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 5000, "\x00", '{"model_type": "mamba"}'])
def test_configurations_that_are_none(content: str, healthy: Path, tmp_path: Path, capsys) -> None:
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


@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.slow)])
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
        words = draw.choice(
            [
                ["report", "--run", str(run)],
                ["export", "--run", str(run), "--target", "gguf", "--plan", path.stem],
            ]
        )
        says_one_line(words, capsys, may_succeed=True)
