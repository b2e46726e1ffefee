"""A run's sensitivities as one file: another run plans from it what the first one planned."""

import lzma
import random
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kl_lens.base.errors import RunError
from kl_lens.run.folder import Run
from kl_lens.run.sharing import take_shared, write_shared
from tests.cli.commands import done, refused


@pytest.fixture(scope="module")
def measured(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with measurements of two formats."""
    folder = tmp_path_factory.mktemp("shared") / "run"
    text = f"--text {tiny_folder / 'text.txt'} --windows 4".split()
    words = [*f"measure {tiny_folder} --run {folder}".split(), *text]
    done(words, "--window-length 32")
    return folder


def shared_from(folder: Path, path: Path) -> Path:
    with Run.open(folder) as run:
        return write_shared(run, path)


def started(measured: Path, folder: Path) -> Run:
    """A new run of the same model."""
    with Run.open(measured) as run:
        identity = dict(run.identity)
    new = Run.create(folder)
    new.identify(identity)
    return new


def test_readings_arrive_and_plans_are_the_same(
    measured: Path, tmp_path: Path, capsys
) -> None:
    path = shared_from(measured, tmp_path / "a.kltable")
    with started(measured, tmp_path / "new") as new, Run.open(measured) as old:
        take_shared(path, new)
        take_shared(path, new)  # nothing twice
        ours = old.table().measurements
        theirs = new.table().measurements
        assert len(ours) == len(theirs) > 0
        for before, after in zip(ours, theirs, strict=True):
            assert (before.component, before.format) == (after.component, after.format)
            for name, estimate in before.metrics.items():
                if name.startswith(("kl_p99", "kl_max")):
                    np.testing.assert_allclose(
                        after.metrics[name].value, estimate.value, rtol=1e-4
                    )
                else:
                    assert after.metrics[name] == estimate, name
    plans = []
    for folder in (measured, tmp_path / "new"):
        plan = f"plan --run {folder} --max-bpw 9 --name small".split()
        done(plan)
        plans.append((folder / "plans/small.json").read_bytes())
    assert plans[0] == plans[1]


def test_no_path_and_no_word_of_the_text_is_in_the_file(
    measured: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    path = shared_from(measured, tmp_path / "a.kltable")
    content = lzma.decompress(path.read_bytes())
    assert str(tmp_path).encode() not in content
    assert str(tiny_folder).encode() not in content
    assert b"text.txt" in content
    assert path.stat().st_size < (measured / "run.sqlite").stat().st_size
    (tmp_path / "b").mkdir()
    (tmp_path / "b/run.sqlite").write_bytes(content)
    with Run.open(tmp_path / "b") as run:
        assert {role.partition("@")[0] for role in run.roles()} == {"calibration"}
        assert not run.journal.rows("SELECT * FROM commands")
        assert "source" not in run.identity


def test_another_model_is_refused(
    measured: Path, tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    path = shared_from(measured, tmp_path / "a.kltable")
    model = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    weights = load_file(model / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    words = f"run {model} --run {tmp_path / 'new'} --table {path}".split()
    assert "was measured on other weights" in refused(capsys, words, "--target openvino")
    with Run.open(tmp_path / "new") as new:
        assert not new.measured_windows(new.measured_role())


SPOILT = {
    "cut off": lambda data: data[: len(data) // 2],
    "no archive": lambda data: b"<html>",
    "empty": lambda data: b"",
    "not a journal": lambda data: lzma.compress(b"plain text"),
    "another database": lambda data: lzma.compress(_with("CREATE TABLE t (x)")),
    "a view": lambda data: lzma.compress(_changed(data, "CREATE VIEW v AS SELECT 1")),
    "a reading that does not add up": lambda data: lzma.compress(
        _changed(data, "UPDATE samples SET token_kl = zeroblob(length(token_kl))")
    ),
}


def _with(statement: str) -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute(statement)
        return database.serialize()


def _changed(data: bytes, statement: str) -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.deserialize(lzma.decompress(data))
        database.execute(statement)
        database.commit()
        return database.serialize()


@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_no_such_file_is_said_in_one_line(
    kind: str, measured: Path, tmp_path: Path
) -> None:
    path = shared_from(measured, tmp_path / "a.kltable")
    path.write_bytes(SPOILT[kind](path.read_bytes()))
    with (
        started(measured, tmp_path / "new") as new,
        pytest.raises(RunError, match=r"a\.kltable") as caught,
    ):
        take_shared(path, new)
    assert "\n" not in str(caught.value)
    with Run.open(tmp_path / "new") as new:
        assert not new.roles()


def test_random_damage_is_one_line_or_makes_no_difference(
    measured: Path, tmp_path: Path
) -> None:
    path = shared_from(measured, tmp_path / "a.kltable")
    content = bytearray(lzma.decompress(path.read_bytes()))
    draw = random.Random(7)
    for case in range(20):
        damaged = bytearray(content)
        for _ in range(8):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(lzma.compress(bytes(damaged), preset=0))
        with started(measured, tmp_path / f"new{case}") as new, suppress(RunError):
            take_shared(path, new)


@pytest.mark.slow
def test_a_run_from_a_table_measures_nothing_and_writes_the_same_file(
    tmp_path: Path, capsys
) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    size = "--windows 2 --window-length 64 --held-out-windows 2 --evaluation-windows 2"
    rest = "--target gguf --max-bytes 4.5MB --rivals none --without benchmark,report"
    words = ["run", "reference:mamba", *size.split(), *rest.split()]
    first = tmp_path / "first"
    second = tmp_path / "second"
    done(words, f"--run {first}")
    path = tmp_path / "mamba.kltable"
    done(f"table --run {first} --out {path}")
    done(words, f"--run {second} --table {path}")
    name = "artifacts/gguf/recommended-gguf-4.5MB/*.gguf"
    (ours,) = second.glob(name)
    (theirs,) = first.glob(name)
    assert ours.read_bytes() == theirs.read_bytes()
    with Run.open(first) as run, Run.open(second) as new:
        role = run.measured_role("gguf")
        assert new.measured_windows(role) == run.measured_windows(role)
    capsys.readouterr()
    other = ["run", "reference:mamba", *size.split(), "--run", str(tmp_path / "third")]
    other += ["--target", "openvino", "--max-bytes", "4.5MB"]
    assert "has no sensitivities for openvino" in refused(
        capsys, other, f"--table {path}"
    )
