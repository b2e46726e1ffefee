"""Writers of files and folders, real processes, killed with SIGKILL before each thing that they do to a file; and the
shipped files, found in a checkout and in an installed wheel."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forks

from kl_lens.base.errors import KLLensError
from kl_lens.base.files import (
    RECORD_FILE,
    reference_path,
    replacing,
    settle,
    whole,
    write_text,
)
from kl_lens.base.system import WINDOWS, locked_folder

FILES = ("graph.xml", "graph.bin", RECORD_FILE)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.base.test_files") as warm:
        yield warm


def export(folder: str, version: str) -> None:
    with replacing(Path(folder)) as draft:
        for name in FILES:
            (draft / name).write_text(version)


def write(path: str, content: str) -> None:
    write_text(Path(path), content)


def killed_at(
    forks: Forks, moment: int, folder: Path, function: str, *arguments: Any
) -> bool:
    """Whether the process was killed before the n-th thing it did to a file of the folder, and not done before it."""
    ended = forks.call(function, arguments, kill_before=moment, folder=folder)
    assert ended.code in (0, -signal.SIGKILL), ended.said
    return ended.code != 0


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_killed_export_leaves_the_old_files_or_the_new_with_their_record(
    forks: Forks, tmp_path: Path
) -> None:
    old = dict.fromkeys(FILES, "old")
    new = dict.fromkeys(FILES, "new")
    states = []
    moment = 0
    while True:
        folder = tmp_path / str(moment)
        export(str(folder), "old")
        (folder / "mine.txt").write_text("of the user")
        (folder / ".digests").mkdir()
        was_killed = killed_at(
            forks, moment, folder, "tests.base.test_files:export", str(folder), "new"
        )
        # Who looks without asking sees one of both, or no record; never a record beside the other's files.
        raw = contents(folder)
        assert RECORD_FILE not in raw or {raw[name] for name in FILES} == {
            raw[RECORD_FILE]
        }
        settle(folder)
        state = contents(folder)
        assert state.pop("mine.txt") == "of the user"
        assert state in (old, new)
        # Remembered digests of the old files do not outlive them.
        assert (folder / ".digests").exists() == (state == old)
        with replacing(folder) as draft:
            (draft / "graph.bin").write_text("later")
        assert not [
            p.name for p in folder.iterdir() if p.name.startswith(".")
        ]  # no leftovers
        if not was_killed:
            break
        states.append(state)
        moment += 1
    assert old in states
    assert new in states
    assert moment > 8


def test_a_killed_writer_of_a_file_leaves_the_old_one_or_the_new(
    forks: Forks, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    moment = 0
    while True:
        write_text(path, "old")
        was_killed = killed_at(
            forks, moment, tmp_path, "tests.base.test_files:write", str(path), "new"
        )
        assert path.read_text() in ("old", "new")
        write_text(tmp_path / "another.json", "clears what was left")
        assert {p.name for p in tmp_path.iterdir()} == {"plan.json", "another.json"}
        if not was_killed:
            break
        moment += 1
    assert path.read_text() == "new"
    assert moment >= 3


def test_a_failed_export_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with pytest.raises(FileNotFoundError), replacing(folder) as draft:
        (draft / "nowhere" / "graph.bin").write_text("half")
    assert not folder.exists()


def test_one_process_writes_to_a_folder_at_a_time(tmp_path: Path) -> None:
    with (
        locked_folder(tmp_path, wait=False),
        pytest.raises(KLLensError, match="another process is writing"),
        replacing(tmp_path),
    ):
        pass
    with replacing(tmp_path) as draft:
        (draft / "x").write_text("1")
    assert contents(tmp_path) == {"x": "1"}


def test_a_file_being_written_is_not_removed(tmp_path: Path) -> None:
    with whole(tmp_path / "slow.gguf") as temporary:
        temporary.write_text("half")
        write_text(tmp_path / "fast.json", "{}")
        assert temporary.exists()
        # safetensors writes its own file and renames it, so that nobody else may read it.
        temporary.unlink()
        temporary.write_text("replaced")
        temporary.chmod(0o600)
        write_text(tmp_path / "fast.json", "{}")
    assert contents(tmp_path) == {"slow.gguf": "replaced", "fast.json": "{}"}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


@pytest.mark.skipif(not WINDOWS, reason="elsewhere open files can be replaced")
def test_on_windows_the_file_that_is_open_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with path.open(), pytest.raises(PermissionError) as refusal:
        write_text(path, "new")
    assert refusal.value.filename == str(path)
    assert contents(tmp_path) == {"plan.json": "old"}


def test_checkout_and_wheel_layouts(tmp_path: Path) -> None:
    package = tmp_path / "src" / "kl_lens"
    (tmp_path / "reference" / "mamba").mkdir(parents=True)
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert reference_path("mamba", package=package) == tmp_path / "reference" / "mamba"

    installed = tmp_path / "site-packages" / "kl_lens"
    (installed / "_reference" / "mamba").mkdir(parents=True)
    assert (
        reference_path("mamba", package=installed) == installed / "_reference" / "mamba"
    )
