"""Command lines, settings files and tokenizers that nobody should give."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from kl_lens.cli.main import VERBS
from kl_lens.pipeline.settings import options_of
from kl_lens.pipeline.verbs import settings_of
from tests.hostile.saying import cases, says_one_line

SLIPS = {
    "a device without a driver": (["inspect", "reference:mamba", "--device", "meta:x"], "--device"),
    "a dtype as a device": (["inspect", "reference:mamba", "--device", "float16"], "--device float16"),
    "an unknown user": (["inspect", "~nosuch/x"], "~nosuch/x"),
    "a path of 300 characters": (["inspect", "x/" + "y" * 300], "yyy"),
    "a run of 300 characters": (["report", "--run", "z" * 300], "zzz"),
    "a tokenizer that is none": (
        ["inspect", "reference:mamba", "--tokenizer", "pyproject.toml"],
        "pyproject.toml",
    ),
    "a config that is none": (["run", "--config", "pyproject.toml"], "pyproject.toml"),
    "escape sequences": (["inspect", "\x1b[2Jx/y/z"], r"\x1b[2J"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_common_slips_are_one_line(name: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    words, named = SLIPS[name]
    line = says_one_line(words, capsys)
    assert named in line
    assert "unexpected" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_cuda(capsys) -> None:
    assert "--device cuda: torch has no such device" in says_one_line(
        ["inspect", "reference:mamba", "--device", "cuda"], capsys
    )


def test_aliases_that_unfold_without_end(tmp_path: Path, capsys) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert "aliases" in says_one_line(["run", "--config", str(tmp_path / "bomb.yaml")], capsys)


@pytest.mark.parametrize(
    "content", ["[" * 5000, "\x00", "windows: [1, 2]", "windows: 1e400", "- x", "windows: -1"]
)
def test_settings_that_make_no_sense(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "odd.yaml").write_text(content)
    line = says_one_line(["run", "--config", str(tmp_path / "odd.yaml")], capsys)
    assert "odd.yaml" in line
    assert "unexpected" not in line


@cases(10, 1000)
def test_changed_settings_files(cases: int, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    names = [option.name for option in options_of(settings_of("run"))]
    file = tmp_path / "odd.yaml"
    for _ in range(cases):
        lines = [
            f"{draw.choice([*names, 'x'])}: {draw.choice(YAML_VALUES)}" for _ in range(draw.randint(1, 3))
        ]
        file.write_text("\n".join(lines))
        says_one_line(["run", "--config", str(file), "--write-config"], capsys, may_succeed=True)


def test_a_token_beyond_all_vocabularies(tmp_path: Path, capsys) -> None:
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 10**9}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    line = says_one_line(
        ["inspect", "reference:mamba", "--tokenizer", str(tmp_path / "tokenizer.json")], capsys
    )
    assert "1000000000" in line


YAML_VALUES = [
    "", "-1", "0", "1.5", "1e400", ".nan", ".inf", "true", "null", "[]", "[1, [2]]", "{}", "{a: {b: c}}", "'", "*x",
    "&x 1", "!!python/object/apply:os.system [ls]", "2026-11-16", "0x7fffffffffffffff", "'\\x1b[31m'", "x", "a,b",
    "12 GB", "5%",
]  # fmt: skip
WORDS = [
    "",
    "-1",
    "0",
    "1e9",
    "nan",
    "a,b",
    " x",
    "../x",
    "~nosuch",
    "\x1b[31m",
    "é" * 90,
    "x" * 300,
    "none",
    "{}",
    "a=b",
    "--",
]


@cases(20, 2000)
def test_random_words_behind_every_flag(
    cases: int, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that is not there, so that nothing long begins."""
    draw = random.Random(cases)
    monkeypatch.chdir(tmp_path)
    for _ in range(cases):
        verb = draw.choice([verb for verb in VERBS if verb not in ("run", "doctor")])
        words = [verb]
        options = options_of(settings_of(verb))
        for option in draw.sample(options, min(3, len(options))):
            if option.flag and not option.is_switch:
                words += [option.flag, draw.choice(WORDS)]
        if verb == "measure" or draw.random() < 0.5:  # without a model it would measure the embedded one
            words.append(draw.choice(WORDS[:-1] if verb == "measure" else WORDS))
        says_one_line(words, capsys, may_succeed=True)
