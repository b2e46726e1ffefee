"""The arithmetic of benchmarks, checked by hand: spreads, ratios, bounds, fits."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from kl_lens.profiling import machine as machine_module
from kl_lens.profiling.bound import decode_bound, limits_hold, prefill_bound, prefill_seconds
from kl_lens.profiling.machine import (
    Bandwidth,
    LoadMeter,
    Machine,
    last_level_cache,
    matmul_rate,
    read_bandwidth,
)
from kl_lens.profiling.spread import compared, ratio_of, spread_of, spreads
from kl_lens.run.records import ARTIFACT, Profile, Quartiles, Subject
from kl_lens.targets.contents import BODY, HEAD, LOOKUP, Contents, StoredWeight


def machine(cache: int | None = None, at_threads: float | None = None) -> Machine:
    """Reads 1,000 bytes and makes 100 operations a second."""
    few = None if at_threads is None else Bandwidth(at_threads, at_threads, 1, 1 << 20, 3)
    return Machine(Bandwidth(1000.0, 900.0, 2, 1 << 20, 3), 100.0, cache, few)


CONTENTS = Contents(
    (
        StoredWeight("embedding", 400, 200, LOOKUP, share=1 / 50),  # 8 bytes: one row
        StoredWeight("in_proj", 60, 30, BODY),
        StoredWeight("experts", 80, 40, BODY, share=2 / 8),  # 20 bytes, 10 parameters
        StoredWeight("head", 100, 50, HEAD),
    ),
    state_bytes=12,
    kv_bytes_per_position=0.5,
)


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert spread_of([5.0, 1.0, 4.0, 2.0, 3.0]) == Quartiles(3.0, 2.0, 4.0, 5)
    assert spread_of([7.0]) == Quartiles(7.0, 7.0, 7.0, 1)


def test_spreads_are_of_rounds() -> None:
    assert spreads([{"s": 1.0}, {"s": 2.0}]) == {"s": Quartiles(1.5, 1.25, 1.75, 2)}
    assert spreads([]) == {}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("disturbed", [0.0, 0.3, 0.6])
def test_disturbances_leave_the_true_ratio_in_the_interval(seed: int, disturbed: float) -> None:
    """Turns of which any share is slowed up to fifteen times, and a machine whose own speed drifts by a tenth."""
    random = np.random.default_rng(seed)
    drift = 1 + 0.1 * np.sin(np.arange(48) / 8)

    def seconds(true: float) -> list[float]:
        slowed = 1 + (random.random(48) < disturbed) * random.exponential(5, 48).clip(0, 14)
        return list(true * drift * random.uniform(1, 1.03, 48) * slowed)

    found = compared(seconds(2.0), seconds(3.0))
    assert found is not None
    assert found.low <= found.median <= found.high
    assert 0.99 * found.low <= 1.5 <= 1.01 * found.high
    if not disturbed:
        assert found.high < 1.1 * found.low


def test_few_turns_have_no_interval_and_equal_files_a_ratio_of_one() -> None:
    assert compared([1.0] * 4, [2.0] * 4) is None
    assert compared([2.0] * 5, [2.0] * 5) == Quartiles(1.0, 1.0, 1.0, 5)


def profile(low: float, high: float, **load: float) -> Profile:
    ratios = {"tokens_per_second": Quartiles((low + high) / 2, low, high, 24)}
    return Profile(Subject(ARTIFACT, "p", "gguf"), "use", "CPU", 2, {}, ratios, None, 1, {}, {}, {}, load)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (profile(1.2, 1.3, stolen=0.2, others=0.05, asked=1.0), "1.25 (1.20–1.30)"),
        (
            profile(0.25, 2.12, stolen=0.42, others=0.1),
            "not measurable here: the machine was busy (42 % stolen)",
        ),
        (profile(0.25, 2.12, others=0.3), "not measurable here: the machine was busy (30 % used by others)"),
        (profile(0.25, 2.12, stolen=0.01), "not measurable here: the machine was busy"),
        # Every token was disturbed alike: a narrow interval around nothing.
        (
            profile(1.0, 1.02, others=0.5, asked=1.0),
            "not measurable here: the machine was busy (50 % used by others)",
        ),
        (profile(1.0, 1.0, others=0.5, asked=1.0), "1.00"),  # the base itself
        (profile(1.2, 1.3), "1.25 (1.20–1.30)"),  # where the load is not known
    ],
)
def test_a_ratio_is_shown_with_its_interval_or_not_at_all(found: Profile, words: str) -> None:
    ratio = ratio_of(found, "tokens_per_second")
    assert ratio.words == words
    shown = ratio.to_json()
    assert ("median" in shown) == ("not_measurable" not in shown) == (ratio.brief != "not measurable")
    assert Profile.from_json(found.to_json()) == found


def test_load_is_what_others_took_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("user", "nice", "system", "idle", "iowait", "steal", "guest", "guest_nice")
    times = namedtuple("times", names)  # type: ignore[misc]
    own = namedtuple("own", ("user", "system"))
    now = [times(10, 0, 0, 50, 0, 5, 3, 0), times(60, 0, 0, 58, 2, 45, 13, 0)]
    used = [own(1, 1), own(31, 1)]
    monkeypatch.setattr(machine_module.psutil, "cpu_times", lambda: now.pop(0))
    monkeypatch.setattr(machine_module.psutil.Process, "cpu_times", lambda self: used.pop(0))
    # 50 s of users, of which 10 are a guest's and 30 ours; 10 idle, 40 stolen; 100 in all.
    assert LoadMeter().read() == pytest.approx({"stolen": 0.4, "others": 0.2})


def test_load_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(machine_module.psutil, "cpu_times", missing)
    assert LoadMeter().read() == {}


def test_a_token_reads_weights_state_and_keys() -> None:
    assert CONTENTS.weight_bytes_per_token == pytest.approx(8 + 60 + 20 + 100)
    bound = decode_bound(CONTENTS, machine(), context=100, tokens_per_second=2.0)
    assert bound["kv_bytes_per_token"] == 50
    assert bound["bytes_per_token"] == pytest.approx(188 + 12 + 50)
    assert bound["tokens_per_second"] == pytest.approx(1000 / 250)
    assert bound["share"] == pytest.approx(2.0 * 250 / 1000)
    assert "fits_in_cache" not in bound  # the machine did not say how much its caches hold


@pytest.mark.parametrize(("cache", "fits"), [(249, 0.0), (250, 1.0)])
def test_a_model_that_fits_into_the_cache_is_marked(cache: int, fits: float) -> None:
    assert (
        decode_bound(CONTENTS, machine(cache), context=100, tokens_per_second=None)["fits_in_cache"] == fits
    )


def test_fewer_threads_have_a_share_of_their_own() -> None:
    bound = decode_bound(CONTENTS, machine(at_threads=500.0), context=100, tokens_per_second=1.0)
    assert (bound["share"], bound["share_at_threads"]) == (pytest.approx(0.25), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("device", "holds"), [("CPU", True), ("AUTO", True), ("GPU", False), ("GPU.1", False)]
)
def test_a_gpu_has_limits_of_its_own(device: str, holds: bool) -> None:
    assert limits_hold(device) == holds


def test_a_prompt_is_bound_by_products_or_by_bytes() -> None:
    # Body 30 + 10 parameters for every token, head 50 once, at 100 operations a second.
    assert prefill_seconds(CONTENTS, machine(), 3) == pytest.approx(2 * (40 * 3 + 50) / 100)
    quick = Machine(machine().bandwidth, 1e9, None)
    assert prefill_seconds(CONTENTS, quick, 3) == pytest.approx((188 + 12) / 1000)
    timed = {"first_token_seconds@3": Quartiles(6.8, 6.0, 7.0, 5), "seconds_per_token": Quartiles(1, 1, 1, 5)}
    bound = prefill_bound(CONTENTS, machine(), timed)
    assert bound["prefill_seconds@3"] == pytest.approx(3.4)
    assert bound["prefill_share@3"] == pytest.approx(0.5)


def test_caches_are_read_from_the_system(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):  # two chips, each with a cache of its own
        for index, (level, size) in enumerate(((1, "64K"), (3, "32M"))):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert last_level_cache(tmp_path) == 2 * (32 << 20)
    assert last_level_cache(tmp_path / "nowhere") is None


def test_what_is_timed_reads_every_byte() -> None:
    values = np.arange(8 * 3 * 1000, dtype=np.int64)
    for read in (machine_module.summed, machine_module.summed_by_eight):
        assert read(values, 1) == read(values, 3) == values.sum()


def test_the_machine_is_measured() -> None:
    found = read_bandwidth(1, buffer_bytes=8 << 20, repeats=3)
    assert (found.threads, found.buffer_bytes) == (1, 8 << 20)
    assert found.best >= found.median > 0
    assert matmul_rate(64, 64, 64, threads=1, repeats=2) > 0
