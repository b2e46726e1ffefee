"""Methods that learn from text, as a user meets them: statistics are gathered once, kept apart, never mixed."""

import json
import shlex
from pathlib import Path

import pytest

from kl_lens import planning
from kl_lens.cli.main import main
from kl_lens.run.folder import Run
from kl_lens.targets import read_artifact
from tests.cli.commands import done, refused

ONE_BLOCK = ["--components", r"layers\.1\."]


@pytest.fixture
def texts(tiny_folder: Path, tmp_path: Path) -> dict[str, str]:
    """Three texts that share nothing: to measure on and learn from, to learn from, to judge by."""
    paragraphs = (tiny_folder / "text.txt").read_text().split("\n\n")
    third = len(paragraphs) // 3
    texts_found = {}
    for index, name in enumerate(("measured", "learnt", "judging")):
        path = tmp_path / f"{name}.txt"
        path.write_text("\n\n".join(paragraphs[index * third : (index + 1) * third]))
        texts_found[name] = str(path)
    return texts_found


@pytest.fixture
def measure(tiny_folder: Path, tmp_path: Path, texts: dict[str, str]) -> list[str]:
    return [
        *(
            f"measure {tiny_folder} --run {tmp_path / 'run'} --text {texts['measured']} --windows "
            "2 --window-length 32"
        ).split(),
        *ONE_BLOCK,
    ]


@pytest.fixture
def calibrate(tiny_folder: Path, tmp_path: Path, texts: dict[str, str]) -> list[str]:
    return (
        f"calibrate {tiny_folder} --run {tmp_path / 'run'} --text {texts['learnt']} --windows "
        "4 --window-length 32"
    ).split()


def _formats(folder: Path) -> set[str]:
    with Run.open(folder) as run:
        return {m.format for m in run.measurements()}


def test_calibrate_keeps_statistics_in_the_run_and_does_nothing_twice(
    calibrate: list[str], tmp_path: Path, capsys
) -> None:
    done(calibrate, "--json")
    output = json.loads(capsys.readouterr().out)
    assert output["text"] | {"source": "", "split": ""} == {
        "source": "",
        "split": "",
        "windows": 4,
        "length": 32,
        "seed": 43,
    }
    written = _written(tmp_path / "run/statistics")
    done(calibrate)
    assert output["digest"] in capsys.readouterr().out
    done(f"calibrate --run {tmp_path / 'run'}")  # the run knows its model and its text
    assert _written(tmp_path / "run/statistics") == written


def test_without_statistics_measure_names_the_command_that_gathers_them(
    measure: list[str], tmp_path: Path, capsys
) -> None:
    assert main([*measure, "--formats", "int4+gptq"]) == 1
    err = capsys.readouterr().err.strip()
    assert "has none; gather them with: kl-lens calibrate" in err
    assert err.count("\n") == 0
    command = shlex.split(err.partition("kl-lens calibrate")[2])
    done("calibrate", command, "--windows 4")
    done(measure, "--formats int4+gptq")
    with Run.open(tmp_path / "run") as run:
        measured = run.text_identity("calibration")
    learnt = json.loads((tmp_path / "run/statistics/statistics.json").read_text())[
        "identity"
    ]["text"]
    # The same text, but other windows: what was learnt from does not judge the learning.
    assert measured is not None
    assert (learnt["source"], learnt["length"]) == (
        measured["source"],
        measured["length"],
    )
    assert learnt["seed"] != measured["seed"]


def test_with_a_limit_only_what_plans_near_it_choose_is_measured(
    measure: list[str],
    calibrate: list[str],
    texts: dict[str, str],
    tmp_path: Path,
    capsys,
) -> None:
    done(calibrate)
    near = [
        *measure,
        "--formats",
        "int4+gptq,int4-g64+gptq,int4-g32+gptq,int8+gptq",
        "--json",
        "--held-out",
        texts["judging"],
        "--held-out-windows",
        "4",
    ]
    for limit in (["--max-bytes", "225kB"], ["--max-drop", "0.001%"]):
        done(near, limit)
    with Run.open(tmp_path / "run") as run:
        measured = run.measured_windows("calibration")
        planned = planning.plan_for_budget(
            planning.build_problem(run.table()), max_bytes=225_000
        ).plan
    assert 0 < len(measured) < 4 * 4  # of four components in four formats
    assert all(
        windows == {0, 1} for windows in measured.values()
    )  # screening on fewer windows is kept apart
    assert "unmeasured" not in planned.notes
    done(near, "--max-bytes 225kB")  # the same choice again: nothing is left to measure
    with Run.open(tmp_path / "run") as run:
        assert run.measured_windows("calibration") == measured
    assert "cannot be met" in refused(capsys, near, "--max-bytes 1kB", code=2)


def test_measurements_of_other_statistics_are_never_mixed(
    measure: list[str], calibrate: list[str], tmp_path: Path, capsys
) -> None:
    learnt = [*measure, "--formats", "int4,int4+gptq"]
    done(calibrate)
    done(learnt)
    for path in (tmp_path / "run/statistics").iterdir():
        path.unlink()
    done(calibrate, "--seed 7")
    capsys.readouterr()
    assert "another set of statistics" in refused(capsys, learnt)
    assert (
        main([*calibrate, "--window-length", "1000000", "--again"]) == 1
    )  # the text is shorter
    assert _formats(tmp_path / "run") == {"int4", "int4+gptq"}
    done(calibrate, "--seed 8 --again")
    assert _formats(tmp_path / "run") == {"int4"}  # what learnt nothing is still there
    done(learnt)
    assert _formats(tmp_path / "run") == {"int4", "int4+gptq"}


def test_text_used_for_calibration_is_refused_for_evaluation(
    measure: list[str],
    calibrate: list[str],
    texts: dict[str, str],
    tmp_path: Path,
    capsys,
) -> None:
    done(calibrate)
    done(measure, "--formats int4+gptq")
    plan = f"plan --run {tmp_path / 'run'} --uniform int4+gptq --verify --held-out-windows 2".split()
    capsys.readouterr()
    assert "share" in refused(capsys, plan, f"--held-out {texts['learnt']}")
    assert "share" in refused(
        capsys, f"paper --run {tmp_path / 'run'} --evaluation-text {texts['learnt']}"
    )
    done(plan, f"--held-out {texts['judging']}")


def test_a_plan_names_its_statistics_and_others_are_refused(
    measure: list[str], calibrate: list[str], tmp_path: Path, capsys
) -> None:
    pytest.importorskip("openvino", reason="needs the extra openvino")
    folder = str(tmp_path / "run")
    done(calibrate)
    done(measure, "--formats int4+gptq")
    done(f"plan --run {folder} --uniform int4+gptq,int4")
    plan = json.loads((tmp_path / "run/plans/uniform_int4.gptq.json").read_text())
    with Run.open(tmp_path / "run") as run:
        assert plan["statistics"] == run.statistics
    assert (
        json.loads((tmp_path / "run/plans/uniform_int4.json").read_text())["statistics"]
        is None
    )

    export = f"export --run {folder} --target openvino --plan uniform_int4.gptq".split()
    done(export)
    artifact = read_artifact(tmp_path / "run/artifacts/openvino/uniform_int4.gptq")
    assert artifact.settings["statistics"] == plan["statistics"]
    done(calibrate, "--seed 7 --again")
    capsys.readouterr()
    assert f"made with statistics {plan['statistics']}" in refused(capsys, export)


def _written(folder: Path) -> dict[Path, int]:
    """Files are written beside their place and moved there: another number means written again."""
    return {
        path: path.stat().st_ino
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }
