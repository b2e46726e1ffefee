"""`kl-lens report` on a run that the other verbs made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main


@pytest.fixture(scope="module")
def run_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    text = f"--text {tiny_folder / 'text.txt'} --windows 4 --window-length 32"
    assert main(f"measure {tiny_folder} --run {folder} {text}".split()) == 0
    assert main(["plan", "--run", str(folder), "--paper"]) == 0
    return folder


def test_it_writes_one_file_and_prints_where(run_folder: Path, capsys) -> None:
    assert main(["report", "--run", str(run_folder)]) == 0
    assert capsys.readouterr().out.strip() == str(run_folder / "report.html")
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "tiny-mamba" in page
    assert "kl_point05" in page


def test_out_and_json(run_folder: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "elsewhere" / "page.html"
    assert main(["report", "--run", str(run_folder), "--out", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path)}


def test_open_opens_it_in_the_browser(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    assert main(["report", "--run", str(run_folder), "--open"]) == 0
    assert opened == [(run_folder / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", "--run", str(run_folder), "--open"]) == 0
    assert "no browser found" in capsys.readouterr().err
