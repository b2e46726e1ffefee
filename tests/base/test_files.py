"""Writers of files and folders, real processes, killed with SIGKILL before each thing that they do to a file."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forks
from tests.shipped import shipped_digests

from kl_lens.base.errors import KLLensError
from kl_lens.base.files import RECORD_FILE, naming, replacing, settle, write_text
from kl_lens.targets.exporting import read_artifact

FILES = ("graph.xml", "graph.bin", RECORD_FILE)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.base.test_files") as warm:
        yield warm


def export(folder: str, version: str) -> None:
    with replacing(Path(folder)) as place:
        for name in FILES:
            (place / name).write_text(version)


def write(path: str, content: str) -> None:
    write_text(Path(path), content)


def killed_at(forks: Forks, moment: int, folder: Path, function: str, *arguments: Any) -> bool:
    """Whether the process was killed before the n-th thing it did to a file of the folder, and not done before it."""
    ended = forks.call(function, arguments, kill_before=moment, folder=folder)
    assert ended.code in (0, -signal.SIGKILL), ended.said
    return ended.code != 0


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_killed_export_leaves_the_old_files_or_the_new_with_their_record(
    forks: Forks, tmp_path: Path
) -> None:
    old, new = dict.fromkeys(FILES, "old"), dict.fromkeys(FILES, "new")
    seen, moment = [], 0
    while True:
        folder = tmp_path / str(moment)
        export(str(folder), "old")
        (folder / "mine.txt").write_text("of the user")
        (folder / ".compiled").mkdir()
        was_killed = killed_at(forks, moment, folder, "tests.base.test_files:export", str(folder), "new")
        # Who looks without asking sees one of both, or no record; never a record beside the other's files.
        raw = contents(folder)
        assert RECORD_FILE not in raw or {raw[name] for name in FILES} == {raw[RECORD_FILE]}
        settle(folder)
        found = contents(folder)
        assert found.pop("mine.txt") == "of the user"
        assert found in (old, new)
        # What was compiled of the old files does not outlive them.
        assert (folder / ".compiled").exists() == (found == old)
        with replacing(folder) as place:
            (place / "graph.bin").write_text("later")
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]  # no leftovers
        if not was_killed:
            break
        seen.append(found)
        moment += 1
    assert old in seen
    assert new in seen
    assert moment > 8


def test_a_killed_writer_of_a_file_leaves_the_old_one_or_the_new(forks: Forks, tmp_path: Path) -> None:
    path, moment = tmp_path / "plan.json", 0
    while True:
        write_text(path, "old")
        was_killed = killed_at(forks, moment, tmp_path, "tests.base.test_files:write", str(path), "new")
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
    with pytest.raises(FileNotFoundError), replacing(folder) as place:
        (place / "nowhere" / "graph.bin").write_text("half")
    assert not folder.exists()


def test_one_process_writes_to_a_folder_at_a_time(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(KLLensError, match="another process is writing"), replacing(tmp_path):
        pass
    os.close(handle)
    with replacing(tmp_path) as place:
        (place / "x").write_text("1")
    assert contents(tmp_path) == {"x": "1"}


def test_a_file_being_written_is_not_removed(tmp_path: Path) -> None:
    from kl_lens.base.files import whole

    with whole(tmp_path / "slow.gguf") as temporary:
        temporary.write_text("half")
        write_text(tmp_path / "fast.json", "{}")
        assert temporary.exists()
    assert contents(tmp_path) == {"slow.gguf": "half", "fast.json": "{}"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gguf", "openvino"])
def test_a_real_export_killed_at_any_moment_leaves_a_whole_artifact(
    target: str, forks: Forks, tmp_path: Path
) -> None:
    """The command line itself, killed before every few things that it does to its folder."""
    pytest.importorskip(target, reason=f"needs the extra {target}")
    from kl_lens.cli.main import main

    folder = tmp_path / "made"
    formats = ("q8_0", "q4_0") if target == "gguf" else ("int8", "int4")

    def command(fmt: str) -> list[str]:
        return ["export", "reference:mamba", "--target", target, "--format", fmt, "--out", str(folder)]

    def whole_as() -> str:
        """The plan of the artifact there, whose every tensor must be what the record says."""
        artifact = read_artifact(folder)
        held = shipped_digests(folder)
        assert len(held) > 10
        assert {t.runtime_name: t.digest for t in artifact.tensors if t.runtime_name in held} == held
        return artifact.plan

    moment, seen = 0, set()
    while True:
        assert main(command(formats[0])) == 0
        was_killed = killed_at(forks, moment, folder, "kl_lens.cli.main:main", command(formats[1]))
        seen.add(whole_as())
        if not was_killed:
            break
        moment += 3 if target == "gguf" else 5
    assert seen == {f"uniform_{fmt}" for fmt in formats}
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "said", ["4096 requested and 0 written", "Not enough free space to write 4096 bytes after offset 0"]
)
def test_a_full_disk_that_numpy_met_names_the_file(tmp_path: Path, said: str) -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device.*model\.gguf"),
        naming(tmp_path / "model.gguf"),
    ):
        raise OSError(said)
