"""Unexpected errors and errors of the system: one line, a file to report, no traceback."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from kl_lens.cli.main import UNEXPECTED, main
from tests.cli.commands import done, refused


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
    assert main(f"plan --run {tmp_path} --paper".split()) == UNEXPECTED == 70
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

    assert "Traceback" in refused(
        capsys, f"--debug plan --run {tmp_path} --paper", code=70
    )


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (SafetensorError("I/O error: No space left (os error 28)"), "free some space"),
        (OSError(errno.EFBIG, "File too large"), "use another disk"),
        (OSError(errno.ENFILE, "Too many open files"), "close other programs"),
        (BaseException("Err value: Os { code: 24, kind: Uncategorized }"), "ulimit -n"),
    ],
)
def test_errors_of_the_system_that_libraries_hide(
    error: BaseException, advice: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("kl_lens.study.session.Session.do", broken)
    assert advice in refused(capsys, "plan --paper")


def test_letters_that_a_terminal_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    done("inspect reference:mamba")
    assert b"10 blocks" in written.getvalue()


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w"))
    assert main(["inspect", "reference:mamba"]) == 141


def test_a_full_card_is_said_in_a_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 8 GiB, of which …"
        )

    monkeypatch.setattr("kl_lens.study.session.Session.do", full)
    assert main(["inspect", "reference:mamba"]) == 1
    message = capsys.readouterr().err
    assert "memory is full (CUDA out of memory. Tried to allocate 9 GiB)" in message
    assert "--working-memory" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "kl_lens.cli.main", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "No space left on device; free some space" in process.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [("file/x.yaml", "use another place"), ("x" * 300, "a shorter ")],
)
def test_a_place_that_cannot_be_written_is_said(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "kl_lens.study.session.Session.do", lambda *_: (tmp_path / name).write_text("")
    )
    assert main(["doctor"]) == 1
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert advice in message
