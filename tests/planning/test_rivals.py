"""Never worse at no more bytes: who is recommended, on windows whose answer is plain."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kl_lens.pipeline.planning import TargetPlanner
from kl_lens.planning import Contender, contest, interaction, paired_difference
from kl_lens.records import Estimate, Plan

DIFFICULTY = np.array([0.5, 1.0, 1.5, 2.0])  # common to all plans, as in real text


def contender(name: str, size: int, kl: float, noise: float = 0.0) -> Contender:
    return Contender(name, size, kl * DIFFICULTY + noise * np.array([1.0, -1.0, -1.0, 1.0]))


def test_ours_stays_where_it_is_better_than_every_rival_of_no_more_bytes() -> None:
    ours = contender("ours", 100, 0.010)
    rivals = [contender("small", 90, 0.02), contender("same", 100, 0.011), contender("large", 120, 0.001)]
    found = contest(ours, rivals)
    assert found.winner == "ours"
    assert set(found.beaten) == {"small", "same"}  # the large one proves nothing
    assert all(difference.better(2.0) for difference in found.beaten.values())
    assert "small, same" in found.sentence("ours")


def test_a_better_rival_of_no_more_bytes_takes_the_place() -> None:
    rivals = [contender("good", 100, 0.008), contender("best", 95, 0.007), contender("worse", 80, 0.5)]
    found = contest(contender("ours", 100, 0.010), rivals)
    assert found.winner == "best"
    assert "best is no larger than our own plan" in found.sentence("ours")


def test_a_rival_that_is_level_wins_since_it_is_no_larger() -> None:
    """Lower, but not beyond the error of the paired difference: that is no proof."""
    level = contender("level", 99, 0.0101, noise=0.01)
    assert contest(contender("ours", 100, 0.010), [level]).winner == "level"
    assert contest(contender("ours", 98, 0.010), [level]).winner == "ours"  # now it is larger


def test_a_winner_is_challenged_in_its_turn() -> None:
    """Two level ones, the second smaller still: the smallest of the chain is recommended."""
    chain = [contender("first", 95, 0.010, 0.01), contender("second", 90, 0.0101)]
    assert contest(contender("ours", 100, 0.010), chain).winner == "second"


def test_who_does_not_keep_the_limit_cannot_win() -> None:
    rival = contender("rival", 90, 0.0125, noise=0.01)
    assert contest(contender("ours", 100, 0.012), [rival]).winner == "rival"
    found = contest(contender("ours", 100, 0.012), [rival], keeps=lambda one: one.kl <= 0.0122)
    assert found.winner == "ours"
    assert set(found.beaten) == {"rival"}


def test_no_rival_as_small_is_said() -> None:
    found = contest(contender("ours", 10, 0.01), [contender("large", 20, 0.001)])
    assert found.sentence("ours") == "no rival is as small"


def test_paired_difference() -> None:
    difference = paired_difference(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 4.0, 4.0]))
    assert difference.mean == -0.5
    assert difference.standard_error == pytest.approx(np.std([-1, 0, -1, 0], ddof=1) / 2)
    assert difference.better(1.0)
    assert not difference.better(3.0)
    assert not paired_difference(np.array([1.0]), np.array([2.0])).better(0.1)  # one window proves nothing


def test_the_interaction_is_the_mean_factor_whatever_the_sizes() -> None:
    assert interaction([(0.001, 0.0011), (0.1, 0.11)]) == pytest.approx(1.1)
    assert interaction([(0.01, 0.02), (0.01, 0.005)]) == pytest.approx(1.0)
    assert interaction([(0.0, 0.01), (0.01, 0.0)]) == 1.0  # nothing to learn from
    assert interaction([]) == 1.0


def test_what_other_text_costs_is_told_by_the_rival_that_loses_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(**losses: float) -> SimpleNamespace:
        return SimpleNamespace(measure=lambda plan: SimpleNamespace(kl=Estimate(losses[plan["head"]], 0.0)))

    monkeypatch.setattr(TargetPlanner, "halves", (half(q8_0=0.001, q4_k=0.04), half(q8_0=0.002, q4_k=0.05)))
    planner = TargetPlanner.__new__(TargetPlanner)
    rivals = [Plan(name, {"head": name}, name) for name in ("q8_0", "q4_k")]
    assert planner.other_text(rivals) == pytest.approx(1.25)
    assert planner.other_text([]) == 1.0
