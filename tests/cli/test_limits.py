"""`measure` with a limit: what is predicted, and from what."""

import shutil
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.measuring import screening
from kl_lens.run.folder import CALIBRATION, SCREENED, SECOND_ORDER, Run
from kl_lens.run.records import PREDICTED
from kl_lens.study import measure

pytest.importorskip("openvino", reason="needs the extra openvino")


@pytest.fixture(scope="module")
def calibrated(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    text = ["--text", str(tiny_folder / "text.txt"), "--window-length", "32"]
    words = ["calibrate", str(tiny_folder), "--run", str(folder), *text]
    assert main([*words, "--windows", "4"]) == 0
    return folder


@pytest.fixture
def words(calibrated: Path, tiny_folder: Path, tmp_path: Path) -> list[str]:
    folder = shutil.copytree(calibrated, tmp_path / "run")
    command = f"measure {tiny_folder} --run {folder} --text {tiny_folder / 'text.txt'} --window-length 32 --windows 3"
    more = "--target openvino --max-loss 0.05 --held-out wikitext2:test --held-out-windows 4 --gradients"
    return [*command.split(), *more.split()]


@pytest.fixture
def cheap_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "gradient_work", lambda model: 0.0)


def _failing(*_: object) -> dict:
    raise RuntimeError("derivative for some_kernel is not implemented\nmore")


@pytest.mark.usefixtures("cheap_gradients")
def test_predictions_stay_apart_from_measurements(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words) == 0
    with Run.open(tmp_path / "run") as run:
        role = run.measured_role("openvino")
        estimates = run.load(SECOND_ORDER, CALIBRATION)
        screened = run.load(SCREENED, role)
        measured = run.table(target="openvino").measurements
        everything = run.table(target="openvino", predicted=True).measurements
    assert len(estimates["kl"]) == len(estimates["keys"]) > 0
    assert all(kl > 0 for kl in estimates["kl"])
    assert not any(m.compute_dtype == PREDICTED for m in measured)
    predicted = [m for m in everything if m.compute_dtype == PREDICTED]
    assert len(predicted) == len(everything) - len(measured) > 0
    assert len(everything) >= screened["of"] > screened["measured"]
    # What the run has is not computed again.
    monkeypatch.setattr(measure, "second_order", _failing)
    assert main(words) == 0
    with Run.open(tmp_path / "run") as run:
        assert run.load(SCREENED, role) == screened


def test_a_small_menu_is_measured_where_gradients_cost_more(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(measure, "second_order", _failing)
    assert main(words) == 0  # few components, and the scans of Mamba-1
    assert "no gradients" not in capsys.readouterr().err
    with Run.open(tmp_path / "run") as run:
        assert run.load(SCREENED, run.measured_role("openvino")) is None


@pytest.mark.usefixtures("cheap_gradients")
@pytest.mark.parametrize("asked_for", [True, False])
def test_without_gradients_something_is_measured_first(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    asked_for: bool,
) -> None:
    monkeypatch.setattr(measure, "second_order", _failing)
    assert main(words if asked_for else words[:-1]) == 0
    printed = capsys.readouterr()
    sentence = "no gradients of this model (derivative for some_kernel"
    assert (sentence in printed.out + printed.err) == asked_for
    with Run.open(tmp_path / "run") as run:
        assert run.load(SECOND_ORDER, CALIBRATION) is None
