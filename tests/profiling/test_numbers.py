"""The arithmetic of benchmarks, checked by hand: spreads, ratios, bounds, fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kl_lens.profiling import machine as machine_module
from kl_lens.profiling.bound import decode_bound, limits_hold, prefill_bound, prefill_seconds
from kl_lens.profiling.machine import Bandwidth, Machine, last_level_cache, matmul_rate, read_bandwidth
from kl_lens.profiling.spread import ratios, spread_of, spreads
from kl_lens.records import Quartiles
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


def test_ratios_are_taken_within_each_round_and_more_is_better() -> None:
    # The machine was half as fast in the second round: the ratio does not notice.
    base = [
        {"seconds_per_token": 2.0, "tokens_per_second": 0.5},
        {"seconds_per_token": 4.0, "tokens_per_second": 0.25},
    ]
    fast = [
        {"seconds_per_token": 1.0, "tokens_per_second": 1.0},
        {"seconds_per_token": 2.0, "tokens_per_second": 0.5},
    ]
    found = ratios(fast, base)
    assert found["seconds_per_token"] == Quartiles(2.0, 2.0, 2.0, 2)
    assert found["tokens_per_second"] == Quartiles(2.0, 2.0, 2.0, 2)
    assert spreads(fast)["seconds_per_token"] == Quartiles(1.5, 1.25, 1.75, 2)


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
