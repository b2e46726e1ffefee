"""OpenVINO's benchmark_app: its real output, recorded with 2026.4.1 in data/, and the rule of the two limits."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from kl_lens.base.errors import TargetError
from kl_lens.profiling import published as timing
from kl_lens.targets.openvino.target import BenchmarkApp

DATA = Path(__file__).parent / "data"
APP = BenchmarkApp()


@pytest.fixture
def one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of these tests is only a name."""
    monkeypatch.setattr(BenchmarkApp, "input_shapes", lambda self, path: "input_ids[1,1]")


def test_its_real_output_is_read() -> None:
    text = (DATA / "dynamic.log").read_text()
    report = APP.read(text)
    printed = {
        "Median": f"{report.median_ms:.2f} ms",
        "Average": f"{report.average_ms:.2f} ms",
        "Min": f"{report.min_ms:.2f} ms",
        "Max": f"{report.max_ms:.2f} ms",
        "Throughput": f"{report.throughput_fps:.2f} FPS",
        "Count": f"{report.iterations} iterations",
        "Duration": f"{1e3 * report.duration_seconds:.2f} ms",
    }
    assert all(re.search(rf"{name}: +{value}", text) for name, value in printed.items())
    quick = APP.read((DATA / "microseconds.log").read_text())
    assert (quick.iterations, quick.threads, quick.throughput_fps) == (19240, 2, 19239.91)
    assert quick.median_ms == pytest.approx(0.02603)
    with pytest.raises(
        TargetError, match='Device with "GPU" name is not registered'
    ):  # the innermost reason
        APP.read((DATA / "no_device.log").read_text())


def _printed(iterations: int, seconds: float) -> str:
    text = (DATA / "static.log").read_text()
    report = APP.read(text)
    text = text.replace(f"{report.iterations} iterations\n", f"{iterations} iterations\n")
    return text.replace(
        f"{1e3 * report.duration_seconds:.2f} ms", f"{1e3 * seconds:.2f} ms"
    )


@pytest.mark.parametrize(("iterations", "seconds"), [(49, 70.0), (500, 59.9)])
def test_a_run_that_fell_short_is_extended(
    iterations: int,
    seconds: float,
    one_token: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[int, int]] = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        limits.append(
            (
                int(command[command.index("-t") + 1]),
                int(command[command.index("-niter") + 1]),
            )
        )
        return 0, _printed(iterations, seconds) if len(limits) == 1 else _printed(
            90, 121.0
        )

    monkeypatch.setattr(timing, "_run", run)
    report, command = timing.run_app(APP, Path("model.xml"), tmp_path / "log/model.log")
    assert limits == [(60, 50), (120, 100)]
    assert (report.iterations, report.duration_seconds) == (90, 121.0)
    assert command[command.index("-t") + 1] == "120"
    assert (tmp_path / "log/model.log").read_text().count(
        "Count:"
    ) == 2  # both attempts are kept


def test_a_run_that_never_gets_there_or_fails_is_an_error_that_names_its_log(
    one_token: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path("model.xml")
    log = tmp_path / "model.log"
    outcomes = {
        "did not reach 60 s and 50 iterations": (0, _printed(49, 10.0)),
        r"see .*model\.log": (1, "[ ERROR ] no such device"),
    }
    for message, answer in outcomes.items():
        monkeypatch.setattr(timing, "_run", lambda command, answer=answer: answer)
        with pytest.raises(TargetError, match=message):
            timing.run_app(APP, model, log)
    assert "no such device" in log.read_text()
