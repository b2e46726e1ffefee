"""Never worse at no more bytes: who is recommended, on windows whose answer is plain."""

import math

import numpy as np
import pytest
from scipy import stats

from kl_lens.judging.choosing import (
    Contender,
    best_within,
    closest,
    contest,
    deciding,
    difference_of,
    interval,
    nearest,
    next_larger,
    smallest_that_keeps,
)

DIFFICULTY = np.array([0.5, 1.0, 1.5, 2.0])  # common to all plans, as in real text


def contender(name: str, size: int, kl: float, noise: float = 0.0) -> Contender:
    return Contender.on(
        name, size, kl * DIFFICULTY + noise * np.array([1.0, -1.0, -1.0, 1.0])
    )


def test_ours_stays_if_better_than_every_rival_that_is_no_larger() -> None:
    ours = contender("ours", 100, 0.010)
    rivals = [
        contender("small", 90, 0.03),
        contender("same", 100, 0.015),
        contender("large", 120, 0.001),
    ]
    outcome = contest(ours, rivals)
    assert (outcome.winner, outcome.worse) == (
        "ours",
        ("small", "same"),
    )  # the large one proves nothing
    assert "lower KL than small and same, which are no larger" in outcome.sentence()
    assert contest(ours, rivals[2:]).sentence() == "all stock recipes are larger"
    assert (
        contest(ours, rivals[2:]).sentence(same="twin") == "our plan is the same as twin"
    )


def test_the_best_rival_that_is_no_larger_and_not_worse_wins() -> None:
    rivals = [
        contender("good", 100, 0.008),
        contender("best", 95, 0.007),
        contender("worse", 80, 0.5),
    ]
    outcome = contest(contender("ours", 100, 0.010), rivals)
    assert outcome.winner == "best"
    assert "best is no larger than our plan" in outcome.sentence()
    level = contender(
        "level", 99, 0.0101, noise=0.0001
    )  # higher, but within the error, and that is small
    assert contest(contender("ours", 100, 0.010), [level]).winner == "level"
    assert (
        contest(contender("ours", 98, 0.010), [level]).winner == "ours"
    )  # now it is larger


def test_of_equally_good_rivals_the_smaller_wins_and_sizes_within_two_percent_are_one() -> (
    None
):
    rivals = [contender(name, size, 0.008) for name, size in (("a", 99), ("b", 95))]
    assert contest(contender("ours", 100, 0.010), rivals).winner == "b"
    thousand = contender("thousand", 1000, 0.01)
    for size, alike in ((980, True), (979, False), (1020, True), (1021, False)):
        assert contender("other", size, 0.01).is_as_large_as(thousand) == alike


def test_what_could_be_anything_decides_nothing() -> None:
    """The error hides whether the rival is better or worse, or there is no error at all."""
    unclear = contender("unclear", 90, 0.0101, noise=0.01)
    ours = contender("ours", 100, 0.010)
    outcome = contest(ours, [unclear])
    assert (outcome.winner, outcome.unknown) == ("ours", ("unclear",))
    assert "4 windows are too short a text to tell whether unclear" in outcome.sentence()
    short = [
        Contender.on(subject.name, subject.bytes, subject.windows[:1])
        for subject in (ours, unclear)
    ]
    assert (
        "1 window is too short a text to tell" in contest(short[0], short[1:]).sentence()
    )
    broken = Contender.on("broken", 90, np.full(4, np.nan))
    assert contest(ours, [broken]).unknown == ("broken",)
    assert contest(broken, [ours]).winner == "broken"


def test_a_rival_beyond_the_limit_cannot_win() -> None:
    rival = contender("rival", 90, 0.0121, noise=0.0001)
    assert contest(contender("ours", 100, 0.012), [rival]).winner == "rival"
    outcome = contest(
        contender("ours", 100, 0.012), [rival], keeps=lambda file: file.kl <= 0.0122
    )
    assert (outcome.winner, outcome.beyond) == ("ours", ("rival",))
    assert (
        "rival is as good and no larger, but not within the limit" in outcome.sentence()
    )


def test_paired_difference() -> None:
    first = Contender.on("one", 1, np.array([1.0, 2.0, 3.0, 4.0]))
    two = Contender.on("two", 1, np.array([2.0, 2.0, 4.0, 4.0]))
    difference = difference_of(first, two)
    assert difference.value == -0.5
    assert difference.standard_error == pytest.approx(np.std([-1, 0, -1, 0], ddof=1) / 2)
    test = stats.ttest_1samp([-1, 0, -1, 0], 0).confidence_interval()
    assert interval(first, two) == pytest.approx((test.low, test.high))
    short = [Contender.on("short", 1, np.array([kl])) for kl in (1.0, 2.0)]
    assert interval(*short) == (-np.inf, np.inf)


FILES = [
    Contender(name, size, kl, None)
    for name, size, kl in [
        ("tiny", 500, 0.5),
        ("level", 990, 0.05),
        ("close", 985, 0.02),
        ("twin", 1000, 0.03),
        ("next", 1200, 0.04),
        ("next better", 1210, 0.01),
        ("huge", 2000, 0.001),
    ]
]


@pytest.mark.parametrize(
    ("size", "below", "above", "proving"),
    [
        (1000, "close", "next better", {"close", "next better"}),
        (999, "close", "twin", {"close", "twin"}),  # of those of one size the best
        (600, "tiny", "close", {"tiny", "close"}),
        (1999, "next better", "huge", {"next better", "huge"}),
        (499, None, "tiny", {"tiny"}),
        (9000, "huge", None, {"huge"}),
    ],
)
def test_the_rivals_that_prove_what_a_file_is_worth(
    size: int, below: str | None, above: str | None, proving: set[str]
) -> None:
    ours = Contender("ours", size, 0.0, None)
    smaller = nearest(ours, FILES)
    larger = next_larger(ours, FILES)
    assert (smaller and smaller.name) == below
    assert (larger and larger.name) == above
    assert deciding(ours, FILES) == proving
    # A small file that loses least is one of them, though it is not the nearest.
    best = Contender("best", 400, 0.0001, None)
    assert ("best" in deciding(ours, [*FILES, best])) == (size >= 400)


def test_without_a_recommendation_the_smallest_that_keeps_perplexity() -> None:
    rises = [(FILES[0], 0.021), (FILES[1], 0.02), (FILES[4], 0.001)]
    assert smallest_that_keeps(rises) == FILES[1]
    assert smallest_that_keeps(rises[:1]) is None


def test_the_best_of_those_that_are_no_larger() -> None:
    ours = contender("ours", 100, 0.1)
    rivals = [
        contender("large", 120, 0.01),
        contender("near", 99, 0.3),
        contender("same", 100, 0.2),
    ]
    assert best_within(ours, rivals) is rivals[2]
    assert best_within(ours, rivals[:1]) is None


def test_a_screen_shows_the_judged_rivals_that_are_nearest_in_size() -> None:
    ours = contender("ours", 100, 0.1)
    rivals = [
        contender("far", 200, 0.01),
        contender("near", 101, math.nan),
        contender("small", 80, 0.3),
        contender("large", 110, 0.05),
    ]
    shown = [[file.name for file in closest(ours, rivals, count)] for count in (1, 2, 4)]
    assert shown == [
        ["large", "ours"],
        ["large", "ours", "small"],
        ["far", "large", "near", "ours", "small"],
    ]
