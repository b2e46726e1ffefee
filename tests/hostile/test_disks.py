"""Disks that are full and disks that may not be written: one line, nothing half-written, and the command works once
there is room. A small disk is mounted by a fork, in a name space of its own that goes with it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kl_lens.base.errors import RunError
from kl_lens.cli.main import main
from kl_lens.run.folder import Run
from kl_lens.run.journal import FILE
from tests.families import tiny_model
from tests.forking import Forks
from tests.reporting.sample import make_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")]
NEW_NAME_SPACE, PRIVATE, READ_ONLY, REMOUNT = 0x20000, (1 << 18) | (1 << 14), 1, 32
MAY_NOT = 77


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "mamba"
    tiny_model("mamba").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.hostile.test_disks", "kl_lens.targets.gguf.export", "kl_lens.reporting.page") as warm:
        yield warm


def mount(place: str, options: str, flags: int = 0) -> None:
    c = ctypes.CDLL(None, use_errno=True)
    if not flags:
        done = c.unshare(NEW_NAME_SPACE) or c.mount(None, b"/", None, ctypes.c_ulong(PRIVATE), None)
        if done:
            os._exit(MAY_NOT)
    if c.mount(b"none", place.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()):
        os._exit(MAY_NOT)


def said(*words: str) -> tuple[int, str]:
    """The exit code of a command, and its one line."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    assert "Traceback" not in err.getvalue()
    assert "unexpected" not in err.getvalue(), err.getvalue()
    return code, ([line for line in err.getvalue().splitlines() if "kl-lens" in line] or [""])[-1]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything but the journal's own files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith((FILE, ".lock"))
    }


def on_a_full_disk(made: str, model: str, place: str, room: int) -> int:
    size = sum(path.stat().st_size + 4096 for path in Path(made).rglob("*")) + 2**20
    mount(place, f"size={size}")
    run = Path(shutil.copytree(made, Path(place) / "run"))
    before = contents(run)
    with contextlib.suppress(OSError), (Path(place) / "fill").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    assert os.statvfs(place).f_bavail == 0
    os.truncate(f"{place}/fill", os.path.getsize(f"{place}/fill") - room)
    of_run = ["--run", str(run)]
    for words in (
        ["plan", *of_run, "--max-bpw", "8", "--name", "new"],
        ["report", *of_run],
        ["export", "reference:mamba", "--target", "gguf", "--format", "q8_0", "--out", str(run / "x")],
        ["export", model, "--target", "openvino", "--format", "int8", "--out", str(run / "x")],
        ["run", "--write-config", str(run / "y.yaml")],
    ):
        code, line = said(*words)
        if room and code == 0:  # it was enough
            before = contents(run)
            continue
        assert code == 1, (words, line)
        assert "full" in line or "No space left" in line, line
        assert contents(run) == before, words
    assert room or not (run / "x").exists()
    (Path(place) / "fill").unlink()
    assert said("plan", *of_run, "--max-bpw", "8", "--name", "new")[0] == 0
    assert set(contents(run)) - set(before) <= {"plans/new.json"}
    return 0


@pytest.mark.parametrize("room", [0, 16_384, 131_072, 393_216])
def test_a_full_disk_says_so_and_leaves_nothing_half_written(
    made: Path, model: Path, forks: Forks, tmp_path: Path, room: int
) -> None:
    words = [str(made), str(model), str(tmp_path), room]
    ended = forks.call("tests.hostile.test_disks:on_a_full_disk", words)
    if ended.code == MAY_NOT:
        pytest.skip("may not mount")
    assert ended.code == 0, ended.said


def on_a_read_only_disk(made: str, place: str) -> int:
    mount(place, "size=50000000")
    run = Path(shutil.copytree(made, Path(place) / "run"))
    mount(place, "", READ_ONLY | REMOUNT)
    of_run = ["--run", str(run)]
    for words in (
        ["plan", *of_run, "--max-bpw", "8"],
        ["report", *of_run],
        ["measure", "reference:mamba", *of_run],
    ):
        code, line = said(*words)
        assert code == 1
        assert "run.sqlite" in line
        assert "writable" in line, line
    code, line = said(
        "export", "reference:mamba", "--target", "gguf", "--format", "q8_0", "--out", f"{place}/x"
    )
    assert code == 1
    assert "Read-only file system; use another place" in line
    try:
        Run.create(Path(place) / "new")
    except RunError as error:
        print(error)
        return 0
    return 1


def test_a_read_only_disk_says_so(made: Path, forks: Forks, tmp_path: Path) -> None:
    ended = forks.call("tests.hostile.test_disks:on_a_read_only_disk", [str(made), str(tmp_path)])
    if ended.code == MAY_NOT:
        pytest.skip("may not mount")
    assert ended.code == 0, ended.said
