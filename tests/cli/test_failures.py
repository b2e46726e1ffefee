"""Unexpected errors and errors of the system: one line, a file to report, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kl_lens.cli.main import UNEXPECTED, main


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("a\nb"),
        MemoryError(),
        RecursionError("too deep"),
        BaseException(),
    ],
)
def test_an_unexpected_error_is_one_line_and_a_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("kl_lens.study.session.Session.do", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plan", "--run", str(tmp_path), "--paper"]) == UNEXPECTED == 70
    (file,) = tmp_path.glob("*/unexpected.txt")
    printed = capsys.readouterr().err
    kind = type(error).__name__
    assert printed.startswith(f"kl-lens plan: unexpected error: {kind}")
    assert printed.endswith(f"; please report it with {file}\n")
    assert printed.count("\n") == 1
    content = file.read_text()
    assert f"$ kl-lens plan --run {tmp_path} --paper" in content
    assert "Traceback" in content
    assert kind in content
    assert "kl-lens " in content
    assert "python 3" in content

    assert main(["--debug", "plan", "--run", str(tmp_path), "--paper"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_full_card_is_said_in_a_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 8 GiB, of which …"
        )

    monkeypatch.setattr("kl_lens.study.session.Session.do", full)
    assert main(["inspect", "reference:mamba"]) == 1
    said = capsys.readouterr().err
    assert "memory is full (CUDA out of memory. Tried to allocate 9 GiB)" in said
    assert "--memory-budget" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kl_lens.cli.main", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device; free some space" in done.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [("file/x.yaml", "use another place"), ("x" * 300, "give a shorter one")],
)
def test_a_place_that_cannot_be_written_is_said(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "kl_lens.study.session.Session.do", lambda *_: (tmp_path / name).write_text("")
    )
    assert main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert advice in said
