"""In Python: what completion offers, what type checkers know, what notebooks show."""

import importlib.util
import inspect
import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pandas
import pytest

import kl_lens as kl
from kl_lens.planning import FrontierPoint
from kl_lens.reporting.notebook import PlottedFrontier
from kl_lens.run.records import (
    Component,
    Estimate,
    Measurement,
    Plan,
    Profile,
    Quartiles,
    Rows,
    Score,
    SensitivityTable,
    Subject,
)
from kl_lens.study.events import Bars
from kl_lens.study.keywords import in_python
from tests.docs.markdown import ROOT

USER = """\
import kl_lens as kl
from pathlib import Path

study = kl.Study("reference:mamba", target="gguf", folder=Path("runs/mamba"))
study.measure(windows=8, formats=["q4_k", "q8_0"])
plan = study.plan(max_bytes="4.5MB", minimise="kl")
file: Path = study.export(plan)
kl_of_file: float = study.evaluate(file)[-1].values["kl_mean"].value
kl.compare("a.gguf", file, model="org/model", windows=4).to_pandas()
"""
WRONG = {
    "study.measure(windows=[8])": "windows",
    "study.plan(max_bits=4)": "max_bits",
    'study.plan(minimise="speed")': "minimise",
    "name: int = study.plan(max_loss=0.01)": "Plan",
    'kl.compare("a.gguf", "b.gguf")': "model",
}


def test_mypy_checks_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER + "\n".join(WRONG), encoding="utf-8")
    # The settings and the cache of `./test`, which has checked the package.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(file)],
        cwd=ROOT,
        env={"MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in checked.stdout.splitlines() if ": error:" in line]
    first = USER.count("\n") + 1
    assert len(lines) == len(WRONG), checked.stdout + checked.stderr
    for number, (line, word) in enumerate(zip(lines, WRONG.values(), strict=True), first):
        assert f"mine.py:{number}:" in line
        assert word in line


def test_the_keywords_for_type_checkers_are_those_of_the_settings() -> None:
    path = ROOT / "scripts/keywords.py"
    spec = importlib.util.spec_from_file_location("keywords_script", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stored = script.STUB.read_text(encoding="utf-8")
    assert stored == script.keywords(), "run: python scripts/keywords.py"


def test_completion_offers_names_and_keywords() -> None:
    assert {"Study", "load", "evaluate", "compare", "KLLensError"} <= {*dir(kl)}
    assert "TYPE_CHECKING" not in dir(kl)
    signature = inspect.signature(kl.Study.plan)
    assert signature.parameters["max_bytes"].annotation == "int | str | None"
    assert signature.parameters["held_out_windows"].default == 32
    assert not {"frontier", "device", "self"} & {
        *inspect.signature(kl.Study().plan).parameters
    }
    assert "device" in inspect.signature(kl.evaluate).parameters
    assert "plan" not in [*inspect.signature(kl.Study().export).parameters][1:]
    assert "max_bytes: the best plan" in (inspect.getdoc(kl.Study.plan) or "")
    assert inspect.getdoc(kl.Study.plan).startswith("The best plan within")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--precision int3: expected one of", "precision=int3: expected one of"),
        ("give --max-bytes 4.5MB or --max-loss", "give max_bytes=4.5MB or max_loss="),
        ("--name: taken", "name=: taken"),
        ("measure: kl-lens measure M --run r", "measure: kl-lens measure M --run r"),
    ],
)
def test_errors_name_the_keyword(message: str, expected: str) -> None:
    assert in_python(message) == expected


def test_errors_of_methods_and_functions_name_the_keyword() -> None:
    with pytest.raises(kl.KLLensError, match=r"^windows=-1: expected"):
        kl.Study().measure(windows=-1)
    with pytest.raises(kl.KLLensError, match=r"^windows=0: expected"):
        kl.evaluate("nowhere.gguf", windows=0)


def tabular() -> dict[str, tuple[object, dict[str, object]]]:
    """What is tabular, with part of its first row."""
    component = Component("a", "a.weight", "in_proj", "ssm", 0, (4, 64), 256)
    kl_mean = {"kl_mean": Estimate(0.0125, 0.001)}
    measured = Measurement("a", "int8", kl_mean, 64, 1, "float32", 1.0)
    subject = Subject("artifact", "small", "gguf")
    score = Score(subject, "divergence", "text", kl_mean, 64, {"window": 8}, {}, 1.0)
    time = Quartiles(0.5, 0.4, 0.6, 9)
    speeds = {"seconds_per_token": time}
    profile = Profile(subject, "use", "CPU", 2, speeds, speeds, None, 10, {}, {}, {})
    plan = Plan(
        "small", {"a": "int8"}, "test", 0.0125, 300, target="gguf", fixed_bytes=20
    )
    table = SensitivityTable("m", "mamba", (component,), "a", "a", (measured,))
    values = {"kl_mean": 0.0125, "kl_mean_se": 0.001}
    return {
        "SensitivityTable(m: 1 components, 1 measurements of int8)": (
            table,
            {"component": "a", "recipe": "int8", **values},
        ),
        "Plan(plan small, target gguf, bytes 320, predicted_kl 0.0125)": (
            plan,
            {"component": "a", "recipe": "int8"},
        ),
        "[Score(gguf/small, text: kl_mean 0.0125 ± 0.001)]": (
            Rows([score]),
            {"subject": "gguf/small", "window": 8, **values},
        ),
        "[Profile(gguf/small, CPU: seconds_per_token 0.5)]": (
            Rows([profile]),
            {"seconds_per_token": 0.5, "ratios_seconds_per_token_high": 0.6},
        ),
        "[Plan(plan small, target gguf, bytes 320, predicted_kl 0.0125)]": (
            Rows([plan]),
            {"plan": "small", "bytes": 320, "measured_kl": None},
        ),
        "(FrontierPoint(file_bytes=10, predicted_kl=0.5),)": (
            PlottedFrontier([FrontierPoint(10, 0.5)]),
            {"file_bytes": 10, "predicted_kl": 0.5},
        ),
    }


@pytest.mark.parametrize("shown", tabular())
def test_everything_tabular_is_short_and_goes_to_pandas(shown: str) -> None:
    rows, expected = tabular()[shown]
    assert repr(rows) == shown
    frame = rows.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.iloc[0][[*expected]].to_dict() == expected
    drawn = rows._repr_html_()
    if not isinstance(rows, PlottedFrontier):
        assert f"<td>{next(iter(expected.values()))}</td>" in drawn


def test_what_is_shown_in_a_notebook_is_text() -> None:
    plan = Plan("<script>", {"<b>": "int8"}, "test")
    assert "<script>" not in Rows([plan])._repr_html_()
    assert "<b>" not in plan._repr_html_()
    study = kl.Study("<script>", folder="nowhere")
    assert repr(study) == "Study('<script>', target=None, folder='nowhere')"
    assert "<script>" not in study._repr_html_()


def test_records_have_a_column_for_every_plain_field() -> None:
    component = Component("a", "a.weight", "in_proj", "ssm", 0, (4, 64), 256)
    plain = {f.name for f in fields(component)} - {
        "shape",
        "blocks",
        "tied_with",
        "fused_with",
    }
    assert {*Rows([component]).rows()[0]} == plain


def test_long_work_shows_a_bar_only_where_somebody_looks(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Bars()
    for terminal, visible in (("0", False), ("1", True)):
        monkeypatch.setenv("TTY_COMPATIBLE", terminal)
        monkeypatch.setenv("FORCE_COLOR", terminal if visible else "")
        with events.progress("Measuring") as progress:
            progress.started(2, 0)
            progress.advanced(2, "layer")
        captured = capsys.readouterr()
        assert ("Measuring" in captured.err) is visible
        assert captured.out == ""
    with caplog.at_level(logging.WARNING):
        events.warn("does not fit")
    assert caplog.messages == ["does not fit"]
