"""`kl-lens report` on a run that the other verbs made."""

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main


def test_it_writes_one_file_says_where_and_opens_it(
    measure_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    report = ["report", "--run", str(tmp_path / "run")]
    assert main(measure_arguments) == 0
    assert main(["plan", *report[1:], "--paper"]) == 0
    capsys.readouterr()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    assert main([*report, "--open"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert opened == [(tmp_path / "run/report.html").as_uri()]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "tiny-mamba" in page
    assert "kl_point05" in page
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    elsewhere = tmp_path / "elsewhere" / "page.html"
    assert main([*report, "--open", "--out", str(elsewhere), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == str(elsewhere)
    assert "no browser found" in printed.err
