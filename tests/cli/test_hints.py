"""Every `Next: …` that a command ends with is a command that works as it is printed."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from kl_lens.cli.main import main, parse, settings_from


def hints(output: str) -> list[list[str]]:
    commands = re.findall(r"^Next: kl-lens (.*)$", output, re.MULTILINE)
    return [shlex.split(words) for words in commands]


def test_after_calibrating_and_measuring_the_next_command_works(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "a folder"
    text = ["--text", str(tiny_folder / "text.txt"), "--window-length", "32"]
    run = ["--run", str(folder)]
    assert main(["calibrate", str(tiny_folder), *run, *text, "--windows", "4"]) == 0
    (measure,) = hints(capsys.readouterr().out)
    assert measure[:2] == ["measure", str(tiny_folder)]
    assert main([*measure, *text, "--windows", "2", "--components", "0"]) == 0
    (plan,) = hints(capsys.readouterr().out)
    assert plan[:3] == ["plan", *run]
    assert main(plan) == 0, capsys.readouterr().err


@pytest.mark.parametrize("targets", [(None,), ("openvino", "gguf")])
def test_the_plan_is_for_the_target_that_was_measured(
    targets: Sequence[str | None], tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    words = ["measure", str(tiny_folder), "--run", str(tmp_path / "run")]
    text = ["--text", str(tiny_folder / "text.txt"), "--windows", "1"]
    kind = ["--target", ",".join(map(str, targets))] if targets[0] else []
    few = ["--window-length", "32", "--components", "0.*x_proj", "--formats", "int8"]
    assert main([*words, *text, *kind, *few]) == 0
    commands = [settings_from(parse(hint)) for hint in hints(capsys.readouterr().out)]
    assert [settings.runtime for settings in commands] == [*targets]
    assert {settings.limits.max_loss for settings in commands} == {0.01}


def test_hints_of_inspect_are_understood(tiny_folder: Path, capsys) -> None:
    for limit in (["--memory", "1GB", "--context", "64"], ["--max-bytes", "40kB"]):
        main(["inspect", str(tiny_folder), *limit])
        for words in hints(capsys.readouterr().out):
            assert settings_from(parse(words)).verb == "run"
