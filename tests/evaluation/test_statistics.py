"""Errors over windows and over examples, against what the textbook says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.base.units import parse_share
from kl_lens.evaluation import statistics
from kl_lens.evaluation.tasks import judge, near_chance
from kl_lens.run.records import Estimate
from kl_lens.run.samples import ratio


def test_equal_windows_give_the_standard_error_of_a_mean() -> None:
    sums, weights = np.array([10.0, 14.0, 12.0, 16.0]), np.full(4, 5.0)
    found = ratio(sums, weights)
    assert found.value == pytest.approx(13 / 5)
    assert found.standard_error == pytest.approx((sums / 5).std(ddof=1) / math.sqrt(4))
    assert math.isnan(ratio(np.array([3.0]), np.array([2.0])).standard_error)


def test_a_change_that_is_alike_everywhere_is_known_far_better_than_either_perplexity() -> None:
    generator = np.random.default_rng(0)
    weights = np.full(40, 100.0)
    original = weights * generator.normal(3.0, 0.3, 40)
    changed = original + weights * 0.01
    change = statistics.perplexity_change(changed, original, weights)
    ours, theirs = (statistics.perplexity(nll, weights) for nll in (changed, original))
    assert change.value == pytest.approx(ours.value - theirs.value)
    assert change.standard_error < ours.standard_error / 50


def test_the_error_of_a_quantile_is_that_of_repeated_texts() -> None:
    """Many texts of 50 windows: the spread of their 99th percentiles is the error that each of them claims."""
    generator = np.random.default_rng(1)

    def windows() -> list[np.ndarray]:
        levels = generator.lognormal(0, 0.5, 50)  # windows differ: tokens of one are no independent samples
        return [(level * generator.exponential(1, 200)).astype(np.float32) for level in levels]

    found = [statistics.quantile(windows(), 0.99) for _ in range(200)]
    spread = np.std([f.value for f in found])
    assert np.mean([f.standard_error for f in found]) == pytest.approx(spread, rel=0.2)
    few = [np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32)]
    assert math.isnan(statistics.quantile(few, 0.999).standard_error)  # beyond the text


def test_the_paired_drop_by_hand() -> None:
    """Of ten examples three were lost and one was won: 2 in 10; Agresti and Min's error with half an example each."""
    before = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 0], float)
    after = np.array([0, 0, 0, 1, 1, 0, 0, 0, 1, 0], float)
    drop = statistics.paired_drop(before, after)
    lost, won, n = 3.5, 1.5, 12
    assert drop.value == pytest.approx(0.2)
    assert drop.standard_error == pytest.approx(math.sqrt((lost + won) - (lost - won) ** 2 / n) / n)


def test_verdicts_by_the_whole_error_bar() -> None:
    """No difference on few examples proves little."""
    for examples, verdict in ((40, "not decided"), (2000, "pass")):
        assert judge(statistics.paired_drop(np.ones(examples), np.ones(examples)), 0.03) == verdict
    found = [(0.01, 0.005, "pass"), (0.05, 0.005, "fail"), (0.03, 0.005, "not decided"), (-0.2, 0.01, "pass"),
             (0.01, 0.02, "not decided"), (0.5, math.nan, "not decided")]  # fmt: skip
    assert [judge(Estimate(drop, error), 0.03) for drop, error, _ in found] == [v for *_, v in found]
    assert near_chance(Estimate(0.29, 0.021), 0.25)
    assert not near_chance(Estimate(0.30, 0.02), 0.25)
    assert not near_chance(Estimate(0.0, 0.1), None)  # nothing to guess among


def test_shares() -> None:
    assert parse_share("3%") == parse_share("0.03") == pytest.approx(0.03)
    for wrong in ("three", "300%", "-1%"):
        with pytest.raises(KLLensError, match="not a share"):
            parse_share(wrong)
