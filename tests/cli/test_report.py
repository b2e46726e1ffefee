"""`kl-lens report` on a run that the other verbs made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main


@pytest.fixture
def run_folder(measure_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "run"
    assert main(measure_arguments) == 0
    assert main(["plan", "--run", str(folder), "--paper"]) == 0
    capsys.readouterr()
    return folder


def test_it_writes_one_file_and_prints_where(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--run", str(run_folder)]) == 0
    assert capsys.readouterr().out.strip() == str(run_folder / "report.html")
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "tiny-mamba" in page
    assert "kl_point05" in page


def test_out_and_json(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "elsewhere" / "page.html"
    assert main(["report", "--run", str(run_folder), "--out", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path), "bytes": path.stat().st_size}


def test_open_opens_it_in_the_browser(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    assert main(["report", "--run", str(run_folder), "--open"]) == 0
    assert opened == [(run_folder / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", "--run", str(run_folder), "--open"]) == 0
    assert "no browser found" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--run", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert "has no run" in error
