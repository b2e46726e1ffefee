"""A kernel that computes something slightly wrong: every command that uses it says so, and computes without it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.measuring import metrics
from kl_lens.measuring.metrics import compared_metrics
from kl_lens.model.kernels import swap
from kl_lens.run.folder import CALIBRATION, KERNELS, Run
from tests.cli.commands import done
from tests.planted import growing, larger


@pytest.fixture(autouse=True)
def compared_anew() -> Iterator[None]:
    compared_metrics.cache_clear()
    yield
    compared_metrics.cache_clear()


def warnings_in(capsys) -> list[str]:
    return [
        line for line in capsys.readouterr().err.splitlines() if "is wrong here" in line
    ]


def measured(folder: Path) -> list[float]:
    with Run.open(folder) as run:
        return [
            m.metrics["kl_teacher_to_student"].value
            for m in run.measurements()
            if m.format == "int8"
        ]


def test_every_verb_says_it_once_and_does_without(
    measure_arguments, tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    run = str(tmp_path / "run")
    text = str(tiny_folder / "text.txt")
    wrong = "our kernel for Mamba-1 scan is wrong here"
    sound = [*measure_arguments, "--run", str(tmp_path / "sound"), "--formats", "int8"]
    done(sound)
    compared_metrics.cache_clear()
    monkeypatch.setattr(swap, "selective_scan", growing(swap.selective_scan, 1.0001))
    capsys.readouterr()
    commands = {
        "fast": [*measure_arguments, "--formats", "int8"],
        "plan": f"plan --run {run} --max-loss 1 --held-out-windows 4".split(),
        "evaluate": f"evaluate --run {run} --window-length 32 --windows 2".split(),
        "calibrate": f"calibrate {tiny_folder} --run {run} --text {text} --windows 2".split(),
    }
    for kind, command in commands.items():
        done(command)
        (line,) = warnings_in(capsys)
        assert wrong in line, kind
        assert "transformers' own code computes this model instead" in line, kind
    with Run.open(tmp_path / "run") as journal:
        assert journal.load(KERNELS, CALIBRATION) == wrong
    with Run.open(tmp_path / "sound") as journal:
        assert journal.load(KERNELS, CALIBRATION) is None
    assert measured(tmp_path / "run") == pytest.approx(
        measured(tmp_path / "sound"), rel=3e-5, abs=5e-9
    )
    done(f"report --run {run}")
    assert wrong in (tmp_path / "run/report.html").read_text()


def test_doctor_names_each_wrong_kernel_in_a_line(monkeypatch, capsys) -> None:
    for scan in ("selective_scan", "head_scan", "tracked_scan", "chunked_scan"):
        monkeypatch.setattr(swap, scan, growing(getattr(swap, scan), 1.0001))
    monkeypatch.setattr(
        swap, "causal_convolution", larger(swap.causal_convolution, 1.0001)
    )
    monkeypatch.setattr(
        metrics, "_compare_by_kernel", larger(metrics._compare_by_kernel, 1.0001)
    )
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 1
    part = json.loads(capsys.readouterr().out)["parts"]["Kernels"]
    wrong = {
        line.split(" on the CPU")[0]
        for line in part["problem"].removeprefix("wrong: ").split("; ")
    }
    scans = {
        f"Mamba-{version} scan{suffix}"
        for version in (1, 2)
        for suffix in ("", " (with autograd)")
    }
    assert wrong >= {*scans, "convolution", "KL"}
    assert len(part["facts"]) >= len(wrong)
