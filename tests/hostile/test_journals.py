"""Run folders that are damaged, locked, of another program, in the wrong place, or wanted by two at once."""

import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kl_lens.base.errors import RunError
from kl_lens.cli.main import main
from kl_lens.run.folder import Run
from kl_lens.run.journal import FILE
from tests.hostile.saying import cases, says_one_line
from tests.reporting.sample import make_run


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with measurements, plans, scores and profiles, its journal in one file."""
    folder = tmp_path_factory.mktemp("made") / "run"
    make_run(folder)
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return folder


VERBS = (
    ["report", "--run", "RUN"],
    ["plan", "--run", "RUN", "--max-bpw", "8"],
    ["export", "--run", "RUN", "--target", "gguf"],
    ["export", "--run", "RUN", "--target", "openvino", "--plan", "small"],
)


def commands(run: Path) -> list[list[str]]:
    return [[str(run) if word == "RUN" else word for word in verb] for verb in VERBS]


@cases(10, 700)
def test_changed_bytes_are_one_line_or_make_no_difference(
    healthy_run: Path, tmp_path: Path, capsys, cases: int
) -> None:
    draw = random.Random(cases)
    healthy = (healthy_run / FILE).read_bytes()
    folder = tmp_path / "run"
    shutil.copytree(healthy_run, folder)
    for _ in range(cases):
        damaged = bytearray(healthy)
        for _ in range(draw.choice((1, 8, 64))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        for beside in folder.glob(f"{FILE}-*"):
            beside.unlink()
        (folder / FILE).write_bytes(damaged)
        says_one_line(draw.choice(commands(folder)), capsys, may_succeed=True)


@cases(10, 700)
def test_changed_rows_are_one_line_or_make_no_difference(
    healthy_run: Path, tmp_path: Path, capsys, cases: int
) -> None:
    draw = random.Random(cases)
    words = ("", "{", "[]", "{}", "null", "5", '"x"', "[[" * 5000, '{"a": NaN}')
    odd = [None, *words, b"\xff\xfe", -1, 2**62, 1e308]
    with sqlite3.connect(healthy_run / FILE) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall()
        columns = {
            name: connection.execute(f"PRAGMA table_info({name})").fetchall()
            for (name,) in names
        }
    connection.close()
    folder = tmp_path / "run"
    shutil.copytree(healthy_run, folder)
    for _ in range(cases):
        shutil.copy(healthy_run / FILE, folder / FILE)
        table = draw.choice(sorted(columns))
        column = draw.choice(columns[table])[1]
        value = draw.choice(odd)
        with sqlite3.connect(folder / FILE) as connection:
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
        connection.close()
        says_one_line(draw.choice(commands(folder)), capsys, may_succeed=True)


def test_a_journal_of_another_program(tmp_path: Path, capsys) -> None:
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE identity (name TEXT)")
    connection.close()
    for command in commands(tmp_path):
        assert "run.sqlite" in says_one_line(command, capsys)


def test_a_folder_that_cannot_be_written_is_not_called_another_programs(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    for locked in (
        tmp_path / "file",
        tmp_path / "file/below",
        Path("/proc/nowhere"),
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(RunError) as caught:
            Run.create(locked)
        assert "not a KL Lens journal" not in str(caught.value)
        assert str(locked) in str(caught.value)


WORKS = """
import sys
from pathlib import Path
from kl_lens.run.folder import Run
with Run.open(Path(sys.argv[1])) as run:
    run.note_command(["kl-lens", "measure", "a model"])
    print("works", flush=True)
    sys.stdin.readline()
"""


def test_one_process_works_in_a_run_and_another_is_told_who(
    healthy_run: Path, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(healthy_run, folder)
    plan = ["plan", "--run", str(folder), "--max-bpw", "8"]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout.readline() == "works\n"
    line = says_one_line(plan, capsys)
    assert (
        f"{folder} is in use by process {worker.pid} (kl-lens measure 'a model', since "
        in line
    )
    assert main(["report", "--run", str(folder)]) == 0  # who only reads need not wait
    worker.kill()  # and leaves nothing that would have to be cleared
    worker.wait()
    assert main(plan) == 0
    assert main(plan) == 0
