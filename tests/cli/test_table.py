"""`kl-lens table`: the sensitivities, with bytes and bits, as a table, CSV and JSON."""

import csv
import io
import json
from pathlib import Path

from kl_lens import Study
from kl_lens.run.folder import CALIBRATION, SCREENED, Run
from kl_lens.weights.formats import get_format
from tests.cli.commands import done, refused


def test_rows_say_size_loss_and_whether_it_was_measured(
    measure_arguments: list[str], tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "run"
    done(measure_arguments)
    with Run.open(folder) as run:
        first = run.components[0].name
        run.store(SCREENED, CALIBRATION, {"predicted": [[first, "int4-g32", 0.25]]})
        measurements = run.table().measurements
    capsys.readouterr()

    done(f"table --run {folder} --json")
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(measurements) + 1
    assert [row["measured"] for row in rows] == [True] * len(measurements) + [False]
    for row, measurement in zip(rows, measurements, strict=False):
        assert row["component"] == measurement.component
        kl = measurement.metrics["kl_teacher_to_student"]
        assert row["kl_teacher_to_student"] == kl.value
        assert row["kl_teacher_to_student_se"] == kl.standard_error
        with Run.open(folder) as run:
            (component,) = (c for c in run.components if c.name == row["component"])
        assert row["bytes"] == get_format(row["recipe"]).bytes(component.shape)
        assert row["bits"] == 8 * row["bytes"] / component.parameters
    assert rows[-1]["kl_teacher_to_student"] == 0.25

    done(f"table --run {folder} --csv")
    read = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["component"] for row in read] == [row["component"] for row in rows]
    assert list(read[0])[:2] == ["component", "recipe"]

    done(f"table --run {folder}")
    printed = capsys.readouterr().out
    assert rows[0]["component"] in printed
    assert printed.count("predicted") == 1

    columns = Study("reference:mamba", folder=folder).table.rows()[0]
    assert list(columns) == list(rows[0])


def test_a_run_without_sensitivities_says_how_to_get_some(tmp_path: Path, capsys) -> None:
    Run.create(tmp_path / "run").close()
    assert "kl-lens measure MODEL" in refused(capsys, f"table --run {tmp_path / 'run'}")
