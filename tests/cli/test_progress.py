"""Progress: the forecast follows the pace, the bar and the lines say the same."""

from __future__ import annotations

import pytest

from kl_lens.cli import progress
from kl_lens.cli.progress import Forecast, clock_time, shown_progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_that_of_the_work_left_at_the_pace_seen() -> None:
    clock = Clock()
    forecast = Forecast(clock)
    forecast.start(100.0, 0.0)
    assert forecast.left is None
    for work in (5.0, 20.0, 25.0):
        clock.now += 2 * work
        forecast.advance(work)
    assert forecast.share == 0.5
    assert forecast.left == pytest.approx(100)
    clock.now += 30  # nothing new for a while: it counts down, and never below nothing
    assert forecast.left == pytest.approx(70)
    clock.now += 1000
    assert forecast.left == 0


def test_what_happens_once_and_what_was_done_before_is_no_sample_of_the_pace() -> None:
    clock = Clock()
    forecast = Forecast(clock)
    forecast.start(100.0, 50.0)
    clock.now += 500  # loading and compiling, within the first piece
    forecast.advance(10.0)
    for _ in range(2):
        clock.now += 10
        forecast.advance(10.0)
    assert forecast.share == 0.8
    assert forecast.left == pytest.approx(20)
    assert str(forecast) == " 80 %  0:20 left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (53.2, "0:53"), (600, "10:00"), (3723, "1:02:03")]
)
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


def test_where_there_is_no_terminal_it_is_read_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with shown_progress("Measuring sensitivity", interval=10) as shown:
        shown.started(4.0, 0.0)
        for _ in range(4):
            clock.now += 6
            shown.advanced(1.0, "layers.0 int4")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  layers")[0] for line in lines] == [
        "Measuring sensitivity: 50 %  0:12 left",
        "Measuring sensitivity: 100 %  0:00 left",
    ]
