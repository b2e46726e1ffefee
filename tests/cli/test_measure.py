"""`kl-lens measure` and `rank` as a user runs them, kills and all."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.run.folder import Run


def _metrics(folder: Path) -> dict:
    with Run.open(folder) as run:
        return {(m.component, m.format): m.metrics for m in run.measurements()}


def test_measure_prints_a_table_and_the_next_command(measure_arguments, capsys) -> None:
    assert main(measure_arguments) == 0
    out = capsys.readouterr().out
    assert "backbone.layers.3.mixer.out_proj" in out
    assert "34 candidates × 4 windows (128 tokens each)" in out
    assert "Noise floor" in out
    assert "Next: kl-lens plan --run" in out


def test_json_and_legacy_files(measure_arguments, tmp_path, capsys) -> None:
    assert main([*measure_arguments, "--json", "--legacy-json", str(tmp_path / "out.json")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["measurements"]) == 34
    assert len(json.loads((tmp_path / "out_4bit.json").read_text())) == 17
    assert len(json.loads((tmp_path / "out_8bit.json").read_text())) == 17


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--components", "nothing_like_this"], "matches none of"),
        (["--formats", "int3"], "int3"),
        (["--formats", ","], "names no format"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--text", ""], "--text is empty; give it a value, or leave it out"),
        (["--window-length", "1000000"], "text.txt"),
        (["--memory-budget", "lots"], "is not a size"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(measure_arguments, extra, message, capsys) -> None:
    assert main([*measure_arguments, *extra]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0


def test_another_text_or_dtype_in_the_same_run_is_refused(measure_arguments, capsys) -> None:
    assert main(measure_arguments) == 0
    assert main([*measure_arguments, "--seed", "7"]) == 1
    assert "seed 42, now it is 7" in capsys.readouterr().err
    assert main([*measure_arguments, "--dtype", "bfloat16"]) == 1
    assert "was made with --dtype float32, not bfloat16; give --dtype float32" in capsys.readouterr().err


# Kills itself while it writes the nth piece of work, between two statements of one transaction.
KILLED = """
import os, signal, sys
from kl_lens.cli.main import main
from kl_lens.run.folder import Run

left, store = int(sys.argv[1]), Run.store_samples

def watch(statement):
    if statement.startswith("INSERT INTO effort"):
        os.kill(os.getpid(), signal.SIGKILL)

def counted(run, *arguments):
    global left
    left -= 1
    if left == 0:
        run.journal.set_trace_callback(watch)
    store(run, *arguments)

Run.store_samples = counted
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_killed_while_it_writes_the_sweep_still_ends_with_the_same_table(measure_arguments, tmp_path) -> None:
    whole = [*measure_arguments]
    whole[3] = str(tmp_path / "whole")
    assert main(whole) == 0
    folder = tmp_path / "run"
    for pieces_before in (0, 9):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(pieces_before + 1), *measure_arguments])
        assert killed.returncode == -signal.SIGKILL
        assert _rows(folder) == 4 * pieces_before, (
            "what was being written is not there, what was before it is"
        )
    assert main(measure_arguments) == 0
    assert _metrics(folder) == _metrics(tmp_path / "whole")


def _rows(folder: Path) -> int:
    if not (folder / "run.sqlite").exists():
        return 0
    try:
        with Run.open(folder) as run:
            return sum(len(w) for w in run.measured_windows("calibration").values())
    except Exception:  # the other process is just making the file
        return 0


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(
    measure_arguments, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    store = Run.store_samples

    def stored_and_stopped(*arguments) -> None:
        store(*arguments)
        raise KeyboardInterrupt  # not a signal: tests/conftest.py, `ctrl_c`

    monkeypatch.setattr(Run, "store_samples", stored_and_stopped)
    assert main(measure_arguments) == 130
    assert "Run the same command to continue" in capsys.readouterr().err
    assert _rows(tmp_path / "run") == 4


def test_rank_says_which_metric_predicts_damage(measure_arguments, tiny_folder, tmp_path, capsys) -> None:
    assert main(measure_arguments) == 0
    held_out = tmp_path / "other.txt"
    text = (tiny_folder / "text.txt").read_text()
    words = text.split()
    random.Random(1).shuffle(words)
    held_out.write_text(" ".join(words))
    arguments = (
        f"paper rank --run {tmp_path / 'run'} --evaluation-text {held_out} --evaluation-windows 6".split()
    )
    capsys.readouterr()
    assert main([*arguments, "--other-text", str(_novel(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "Kendall τ" in out
    assert "novel" in out
    with Run.open(tmp_path / "run") as run:
        stored = run.load("ranking", "latest")
    assert len(stored["points"]) == 34


def _novel(tmp_path: Path) -> Path:
    path = tmp_path / "novel.txt"
    path.write_text(" ".join(random.Random(2).choices(["the", "of", "and", "in", ".", ","], k=2000)))
    return path


def test_rank_refuses_text_that_was_calibrated_on(measure_arguments, tiny_folder, tmp_path, capsys) -> None:
    assert main(measure_arguments) == 0
    same = f"paper rank --run {tmp_path / 'run'} --evaluation-text {tiny_folder / 'text.txt'}".split()
    assert main(same) == 1
    assert "text.txt" in capsys.readouterr().err
