"""Run folders of earlier versions, and several kinds of measurements in one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from kl_lens.runs import CALIBRATION, Run
from kl_lens.samples import WindowMetrics
from tests.planning.tables import component


def sample(kl: float) -> WindowMetrics:
    return WindowMetrics(0, 4, 4, 4 * kl, 4 * kl, 1.0, 2.0, 0.0, 4.0, b"\0" * 16)


def store(run: Run, role: str, kl: float) -> None:
    run.store_samples(role, "c0", "int8", [sample(kl)], 0.1, "float32")


def identify(run: Run) -> None:
    about = {"model": "m", "model_type": "mamba", "head": "c0", "embedding": "c0", "model_fingerprint": "f"}
    run.identify(about | {"components": [component("c0").to_json()]})


def kl_of(run: Run, target: str | None) -> float:
    (found,) = run.table(target=target).measurements
    return found.metrics["kl_teacher_to_student"].value


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
        assert kl_of(run, "openvino") == pytest.approx(0.1)  # nothing measured as it computes: weights alone
        assert run.kinds() == ("as gguf computes", "weights alone")


@pytest.mark.parametrize("activations", ["weights", "gguf"])
def test_a_run_of_one_kind_from_before_is_read_as_what_it_is(tmp_path: Path, activations: str) -> None:
    with Run.create(tmp_path) as run:
        identify(run)
        store(run, CALIBRATION, 0.1)
        run.store("noise", CALIBRATION, {"kl_teacher_to_student": 1e-9})
    with sqlite3.connect(tmp_path / "run.sqlite") as database:
        database.execute("INSERT INTO identity VALUES ('activations', ?)", (json.dumps(activations),))
        database.execute("PRAGMA user_version = 2")
    database.close()
    with Run.open(tmp_path) as run:
        assert "activations" not in run.identity
        assert run.usual_target == (None if activations == "weights" else "gguf")
        assert kl_of(run, run.usual_target) == pytest.approx(0.1)
        assert run.load("noise", run.measured_role()) is not None
        store(
            run, CALIBRATION if activations == "gguf" else "calibration@gguf", 0.3
        )  # the other kind is welcome
        assert len(run.kinds()) == 2
