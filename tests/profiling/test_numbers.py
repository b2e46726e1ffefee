"""The arithmetic of benchmarks, checked by hand, and peak memory against what psutil says."""

import subprocess
import sys

import numpy as np
import pytest

from kl_lens.profiling import machine
from kl_lens.profiling.machine import (
    LoadMeter,
    bound_of,
    compared,
    fill,
    limits_hold,
    spread_of,
    summed,
)
from kl_lens.run.ratios import ratio_of
from kl_lens.run.records import ARTIFACT, Profile, Quartiles, Subject
from kl_lens.targets.abilities import Contents


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("disturbed", [0.0, 0.3, 0.6])
def test_disturbances_leave_the_true_ratio_in_the_interval(
    seed: int, disturbed: float
) -> None:
    """Turns of which any share is slowed up to fifteen times, and a machine whose own speed drifts by a tenth."""
    random = np.random.default_rng(seed)
    drift = 1 + 0.1 * np.sin(np.arange(48) / 8)

    def seconds(true: float) -> list[float]:
        slowed = 1 + (random.random(48) < disturbed) * random.exponential(5, 48).clip(
            0, 14
        )
        return list(true * drift * random.uniform(1, 1.03, 48) * slowed)

    ratio = compared(seconds(2.0), seconds(3.0))
    assert ratio is not None
    assert ratio.low <= ratio.median <= ratio.high
    assert 0.99 * ratio.low <= 1.5 <= 1.01 * ratio.high
    if not disturbed:
        assert ratio.high < 1.1 * ratio.low


def test_spreads_few_turns_have_no_interval_and_equal_files_a_ratio_of_one() -> None:
    assert spread_of([5.0, 1.0, 4.0, 2.0, 3.0]) == Quartiles(3.0, 2.0, 4.0, 5)
    assert compared([1.0] * 4, [2.0] * 4) is None
    assert compared([2.0] * 5, [2.0] * 5) == Quartiles(1.0, 1.0, 1.0, 5)


def profile(low: float, high: float, **load: float) -> Profile:
    ratios = {"tokens_per_second": Quartiles((low + high) / 2, low, high, 24)}
    return Profile(
        Subject(ARTIFACT, "p", "gguf"),
        "use",
        "CPU",
        2,
        {},
        ratios,
        None,
        1,
        {},
        {},
        {},
        load,
    )


BUSY = "not measurable here: the machine was busy"


@pytest.mark.parametrize(
    ("timed", "words"),
    [
        (profile(1.2, 1.3, stolen=0.2, others=0.05, asked=1.0), "1.25 (1.20–1.30)"),
        (profile(0.25, 2.12, stolen=0.42, others=0.1), f"{BUSY} (42 % stolen)"),
        (profile(0.25, 2.12, others=0.3), f"{BUSY} (30 % used by others)"),
        (profile(0.25, 2.12, stolen=0.01), BUSY),
        # Every token was disturbed alike: a narrow interval around nothing.
        (profile(1.0, 1.02, others=0.5, asked=1.0), f"{BUSY} (50 % used by others)"),
        (profile(1.0, 1.0, others=0.5, asked=1.0), "1.00"),  # the base itself
        (profile(1.2, 1.3), "1.25 (1.20–1.30)"),  # where the load is not known
    ],
)
def test_a_ratio_is_shown_with_its_interval_or_not_at_all(
    timed: Profile, words: str
) -> None:
    ratio = ratio_of(timed, "tokens_per_second")
    assert ratio.words == words
    shown = ratio.to_json()
    assert (
        ("median" in shown)
        == ("not_measurable" not in shown)
        == (ratio.brief != "not measurable")
    )


def test_a_token_reads_weights_state_and_keys() -> None:
    bound = bound_of(Contents(188.0, 12, 0.5), 1000.0, context=100, tokens_per_second=2.0)
    expected = {
        "bytes_per_token": 250,
        "read_bandwidth": 1000,
        "tokens_per_second": 4,
        "share": 0.5,
    }
    assert bound == pytest.approx(expected)
    devices = {
        "CPU": True,
        "AUTO": True,
        "GPU": False,
        "GPU.1": False,
    }  # GPUs have memory of their own
    assert {device: limits_hold(device) for device in devices} == devices


ALLOCATED = 300 << 20
# Allocates, lets go, and only then asks: it is the peak that counts.
PROGRAM = f"""
import numpy as np, psutil
from kl_lens.base.system import peak_memory, resident_memory
base = resident_memory()
block = np.ones({ALLOCATED}, np.uint8)
alive = psutil.Process().memory_info().rss
del block
print(base, peak_memory(), alive)
"""


def test_the_peak_is_what_psutil_sees() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    base, peak, alive = (int(word) for word in result.stdout.split())
    assert peak == pytest.approx(alive, rel=0.05)
    assert peak - base == pytest.approx(ALLOCATED, rel=0.05)


def test_what_is_read_is_read_once() -> None:
    values = np.zeros(3 * 8 * 5, np.int64)
    fill(values, 3)
    assert values.tolist() == list(range(120))
    assert summed(values, 3) == 119 * 120 // 2


def test_others_are_those_who_used_the_processors_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [
        {"whole": 100.0, "others": 40.0, "stolen": 10.0},
        {"whole": 120.0, "others": 45.0, "stolen": 9.0},  # clocks may run backwards
        {"whole": 100.0, "others": 50.0},
        {},
    ]
    monkeypatch.setattr(machine, "_processor_seconds", lambda: states.pop(0))
    meter = LoadMeter()
    assert meter.read() == {"others": 0.25, "stolen": 0.0}
    assert meter.read() == meter.read() == {}  # no time has passed, or nothing is known
