"""Progress: the forecast follows the pace and counts all that is to come; the bar and the lines say the same."""

from collections.abc import Mapping
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from kl_lens.cli import progress
from kl_lens.cli.progress import Forecast
from kl_lens.cli.run import Screen
from kl_lens.cli.terminal import wrapped
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.study.run import RunSettings, costs
from kl_lens.study.run.stages import estimate, stages_of
from kl_lens.targets.openvino.target import OpenVINOTarget
from tests.measuring.conftest import loaded


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


# A run for two targets: what was expected of each stage, and whether it tells how far it is.
RUN = (
    ("export", "a", 2.0, False),
    ("export", "b", 2.0, False),
    ("evaluate", None, 11.0, True),
    ("calibrate", None, 14.0, True),
    ("measure", "a", 46.0, True),
    ("plan", "a", 11.0, False),
    ("measure", "b", 85.0, True),
    ("plan", "b", 11.0, False),
    ("export", "a", 5.0, False),
    ("export", "b", 5.0, False),
    ("evaluate", None, 48.0, True),
    ("generate", None, 4.0, False),
    ("benchmark", None, 50.0, True),
    ("report", None, 2.0, False),
)
RUNTIMES = dict.fromkeys(("export", "evaluate", "generate", "benchmark"), 3.0)
MODEL = dict.fromkeys(("calibrate", "measure", "plan"), 3.0)


@pytest.mark.parametrize(
    "longer", [{}, RUNTIMES | MODEL, RUNTIMES, {"calibrate": 3.0}, {"measure": 3.0}]
)
def test_from_a_quarter_on_a_run_is_forecast_within_a_half(
    longer: Mapping[str, float],
) -> None:
    """`longer`: how many times longer than expected stages take."""
    clock = Clock()
    forecast = Forecast(clock)
    forecast.expect(
        [StageCost(verb, target, seconds) for verb, target, seconds, _ in RUN]
    )
    estimates: list[tuple[float, float]] = []
    for verb, target, seconds, tells in RUN:
        forecast.begin(verb, target)
        if tells:
            forecast.start(20.0, 0.0)
        for _ in range(20):
            clock.time += longer.get(verb, 1.0) * seconds / 20
            if tells:
                forecast.advance(1.0)
            estimates.append((clock.time, forecast.left or 0.0))
        forecast.end()
    assert forecast.left == 0
    ratios = [
        remaining / (clock.time - now)
        for now, remaining in estimates
        if clock.time / 4
        <= now
        <= 0.97 * clock.time  # the last seconds are rounded anyway
    ]
    assert 1 / 1.5 < min(ratios) <= max(ratios) < 1.5, (min(ratios), max(ratios))


def test_inside_a_stage_of_a_run_the_time_left_is_that_of_the_whole_run(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    estimate = JobEstimate(
        (StageCost("measure", "gguf", 240.0), StageCost("report", None, 60.0)), 0, 4
    )
    screen = Screen("run", lambda terminal, result: None)
    for expected in (None, estimate):
        if expected is not None:
            screen.expect(expected)
        with screen.stage("measure", "gguf"), screen.progress("measuring") as shown:
            shown.started(4.0, 0.0)
            for _ in range(4):
                clock.time += 60
                shown.advanced(1.0, "layers.0 int4")
    with screen.stage("report", None):
        clock.time += 60
    assert capsys.readouterr().err.splitlines() == [
        "Measuring sensitivity, llama.cpp: 25 %  3:00 left in this stage",
        "Measuring sensitivity, llama.cpp: 50 %  2:00 left in this stage",
        "Measuring sensitivity, llama.cpp: 75 %  1:00 left in this stage",
        "Measuring sensitivity, llama.cpp: 100 %  0:00 left in this stage",
        "Measuring sensitivity, llama.cpp   4:00",
        "About 5:00 in all.",
        "Measuring sensitivity, llama.cpp: 25 %  4:00 left in all",
        "Measuring sensitivity, llama.cpp: 50 %  3:00 left in all",
        "Measuring sensitivity, llama.cpp: 75 %  2:00 left in all",
        "Measuring sensitivity, llama.cpp: 100 %  1:00 left in all",
        "Measuring sensitivity, llama.cpp   4:00  about 1:00 left",
        "Writing the report                 1:00",
    ]


def test_lines_wrap_at_word_ends_and_commands_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    line = "  of a long sentence, a/path/that/is/longer/than/it: kl-lens run x --run y --force"
    terminal: Any = SimpleNamespace(isatty=lambda: True)
    assert wrapped(line, terminal).split("\n") == [
        "  of a long sentence,",
        "  a/path/that/is/longer/than/it:",
        "  kl-lens run x --run y --force",
    ]
    assert wrapped(line, StringIO()) == line


@pytest.mark.parametrize(
    ("compiling", "busy", "sentence"),
    [
        (0.0, 0.1, "About 1:30 in all."),
        (20.0, 0.0, "About 1:30 in all, with 0:20 to compile kernels, once."),
        (0.0, 0.6, "About 1:30 in all. Other programs use 60 % of the processors now"),
    ],
)
def test_what_makes_a_run_longer_is_said(
    compiling: float, busy: float, sentence: str, capsys
) -> None:
    stages = (StageCost("measure", "gguf", 90.0),)
    estimate = JobEstimate(stages, 0, 4, compiling, busy)
    Screen("run", lambda terminal, result: None).expect(estimate)
    assert capsys.readouterr().err.startswith(sentence)


def of_a_run(**flags: object) -> RunSettings:
    few = {"windows": 4, "window_length": 16, "held_out_windows": 4}
    few |= {"evaluation_windows": 4, "repeats": 1}
    return RunSettings.of(model="m", exhaustive=True, **few | flags)


@pytest.mark.parametrize(("busy", "compiled"), [(0.5, True), (0.0, False)])
def test_a_busy_machine_does_not_multiply_the_forecast_and_kernels_count_once(
    busy: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine half of which others use, everything that is timed takes twice as long."""
    model = loaded("mamba")
    settings = of_a_run(target=("gguf", "openvino"), formats=("q8_0", "q4_0", "int8"))

    def seconds_of_stages(seconds: float, busy: float, compiled: bool) -> list[float]:
        monkeypatch.setattr(costs, "_shortest", lambda *_: seconds)
        monkeypatch.setattr(costs.LoadMeter, "read", lambda meter: {"others": busy})
        monkeypatch.setattr(costs, "_has_kernels", lambda: compiled)
        expected = estimate(settings, model, opened=1.0)
        assert expected.compiling == (0.0 if compiled else costs.COMPILING)
        return [stage.seconds for stage in expected.stages]

    quiet = seconds_of_stages(1.0, 0.0, True)
    changed = seconds_of_stages(2.0 if busy else 1.0, busy, compiled)
    more = [b - a for a, b in zip(quiet, changed, strict=True) if b != pytest.approx(a)]
    assert more == pytest.approx([] if compiled else [costs.COMPILING])


def test_stages_are_forecast_in_the_order_in_which_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "_shortest", lambda *_: 1.0)
    settings = of_a_run(target=("gguf", "openvino"), formats=("q8_0", "int8"))
    expected = estimate(settings, loaded("mamba"), opened=1.0)
    estimates = [(stage.verb, stage.target) for stage in expected.stages]
    stages = [
        (stage.verb, stage.target)
        for stage in stages_of(settings, settings.wanted, ahead=False)
    ]
    unknown = [stage for stage in stages if stage not in estimates]
    assert unknown == [("plan", None), ("calibrate", None)]  # at once; not needed
    assert estimates == [stage for stage in stages if stage not in unknown]
    searched = [
        (verb, target)
        for target in settings.wanted
        for verb in ("measure", "plan", "export")
    ]
    begin = estimates.index(searched[0])
    assert estimates[begin : begin + len(searched)] == searched


def test_the_forecast_counts_the_memory_in_which_files_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded("mamba")
    monkeypatch.setattr(costs, "_shortest", lambda *_: 1.0)
    now = SimpleNamespace(rss=10**9)
    monkeypatch.setattr(costs.psutil.Process, "memory_info", lambda _: now)
    monkeypatch.setattr(OpenVINOTarget, "writing_bytes", 1e6)
    weights = sum(c.parameters for c in model.anatomy.components)
    for target, written in (("gguf", 0), ("openvino", 1e6 * weights)):
        settings = of_a_run(
            target=(target,), formats=("int8" if written else "q8_0",), windows=1
        )
        expected = estimate(settings, model, opened=1.0)
        assert (expected.memory == 10**9 + written) == bool(written)
