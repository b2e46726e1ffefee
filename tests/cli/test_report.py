"""`kl-lens report` on a run that the other verbs made."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import done


def test_it_writes_one_file_says_where_and_opens_it(
    measure_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    report = f"report --run {tmp_path / 'run'}".split()
    done(measure_arguments)
    done("plan", report[1:], "--paper")
    capsys.readouterr()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    done(report, "--open")
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert opened == [(tmp_path / "run/report.html").as_uri()]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "tiny-mamba" in page
    assert "kl_point05" in page
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    elsewhere = tmp_path / "elsewhere" / "page.html"
    done(report, f"--open --out {elsewhere} --json")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == str(elsewhere)
    assert "no browser found" in printed.err
