"""Loss by position: the slope and its error, and from `evaluate` to the report."""

import math
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import tiny_folder  # noqa: F401

import kl_lens as kl
from kl_lens import planning
from kl_lens.cli.main import main
from kl_lens.run.positions import FALLS, GROWS, STEADY, by_position
from kl_lens.run.records import Plan

TOKENS = 2047
WINDOWS = 6


def windows(slope: float, scatter: float) -> list[np.ndarray]:
    """KL that begins at 0.05 and grows by `slope` per 1,000 tokens, each window with its own level and noise."""
    random = np.random.default_rng(0)
    thousands = np.arange(TOKENS) / 1000
    return [
        0.05 * random.lognormal(0, scatter)
        + slope * thousands
        + random.normal(0, scatter / 50, TOKENS)
        for _ in range(WINDOWS)
    ]


def test_the_slope_is_the_mean_of_the_windows_slopes() -> None:
    losses = windows(0.01, 0.3)
    curve = by_position(losses)
    assert curve.starts == (0, 512, 1024, 1536)
    width = 512
    centres = [0.256, 0.768, 1.280, (1536 + 2047) / 2000]
    means = np.array(
        [[w[start : start + width].mean() for start in curve.starts] for w in losses]
    )
    slopes = [
        np.polyfit(centres, row, 1, w=np.sqrt([512, 512, 512, 511]))[0] for row in means
    ]
    assert curve.slope.value == pytest.approx(np.mean(slopes))
    assert curve.slope.standard_error == pytest.approx(
        np.std(slopes, ddof=1) / math.sqrt(WINDOWS)
    )
    assert [mean.value for mean in curve.means] == pytest.approx(means.mean(0).tolist())


@pytest.mark.parametrize(
    ("slope", "trend"), [(0.02, GROWS), (-0.02, FALLS), (0.0, STEADY)]
)
def test_a_trend_is_only_claimed_beyond_its_error(slope: float, trend: str) -> None:
    assert by_position(windows(slope, 0.3)).trend == trend
    assert by_position(windows(slope, 0.3)[:1]).trend == STEADY  # one window has no error


def test_from_evaluating_to_the_report(
    tiny_folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = str(tiny_folder / "text.txt")
    study = kl.Study(tiny_folder, folder=tmp_path / "run")
    study.measure(text=text, windows=2, window_length=32, formats=("int8",))
    components = study.table.components
    worst = Plan("worst", {c.name: "int4" for c in components if c.quantizable}, "test")
    planning.write_plan(
        worst, planning.plan_path(study.folder / "plans", "worst"), components
    )
    original, plan = study.evaluate(
        target=("torch",), positions="wikitext2:test", window_length=64, windows=4
    )
    assert {score.kind for score in (original, plan)} == {"positions"}
    assert not any(name.startswith("kl") for name in original.values)
    (mean,) = study.evaluate(
        target=("torch",), divergence="wikitext2:test", window_length=64, windows=4
    )
    counts = np.array([16, 16, 16, 15])
    bins = [plan.values[f"kl@{start}"].value for start in (0, 16, 32, 48)]
    assert np.average(bins, weights=counts) == pytest.approx(
        mean.values["kl_mean"].value, rel=1e-5
    )

    page = study.report().read_text(encoding="utf-8")
    assert "Does the loss grow along the text?" in page
    assert (
        main(
            [
                "evaluate",
                "--run",
                str(study.folder),
                "--positions",
                "--window-length",
                "64",
                "--windows",
                "4",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "slope per 1,000 tokens" in shown
    assert "original: cross-entropy" in shown
