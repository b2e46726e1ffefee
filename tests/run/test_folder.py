"""Run folders of other versions, and several kinds of measurements in one."""

import sqlite3
from pathlib import Path

import pytest
from tests.planning.tables import component
from tests.samples import window_of

from kl_lens.base.errors import RunError
from kl_lens.run.folder import CALIBRATION, Run
from kl_lens.run.readings import Reading


def sample(kl: float) -> Reading:
    return window_of(0, 4, kl, kl)


def store(run: Run, role: str, kl: float) -> None:
    run.store_samples(role, "c0", "int8", [sample(kl)], 0.1, "float32")


def identify(run: Run) -> None:
    about = {
        "model": "m",
        "model_type": "mamba",
        "head": "c0",
        "embedding": "c0",
        "model_fingerprint": "f",
    }
    run.identify(about | {"components": [component("c0").to_json()]})


def kl_of(run: Run, target: str | None) -> float:
    (measurement,) = run.table(target=target).measurements
    return measurement.metrics["kl_teacher_to_student"].value


def test_targets_stand_beside_weights_alone(tmp_path: Path) -> None:
    with Run.create(tmp_path) as run:
        identify(run)
        store(run, "calibration@gguf", 0.2)
        assert run.usual_target == "gguf"  # there is nothing else
        assert kl_of(run, None) == kl_of(run, "gguf") == pytest.approx(0.2)
        store(run, CALIBRATION, 0.1)
        assert run.usual_target is None
        assert kl_of(run, None) == pytest.approx(0.1)
        assert kl_of(run, "gguf") == pytest.approx(0.2)
        assert kl_of(run, "openvino") == pytest.approx(
            0.1
        )  # nothing measured as it computes: weights alone


@pytest.mark.parametrize(
    ("version", "maker"),
    [(0, "an older"), (2, "an older"), (99, "a newer")],
)
def test_a_journal_of_another_version_is_refused_in_one_line(
    tmp_path: Path, version: int, maker: str
) -> None:
    Run.create(tmp_path).close()
    journal = sqlite3.connect(tmp_path / "run.sqlite")
    journal.execute(f"PRAGMA user_version = {version}")
    journal.close()
    before = (tmp_path / "run.sqlite").read_bytes()
    with pytest.raises(
        RunError,
        match=f"made by {maker} version of KL Lens \\(version {version} .* give another --run or delete it",
    ):
        Run.open(tmp_path)
    assert (tmp_path / "run.sqlite").read_bytes() == before
