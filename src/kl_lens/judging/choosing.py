"""Which of two plans or files is better, which one is recommended, and why.

Two subjects are compared window by window on the same text, so that what is hard for both cancels. A rival replaces our
plan only if it is no larger and known not to be worse; what the text is too short to tell decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts load on first use

from kl_lens.base.units import human_bytes
from kl_lens.run.readings import mean
from kl_lens.run.records import Estimate

Windows = npt.NDArray[np.float64]  # mean KL of every window of a fixed text
AS_GOOD = 0.05  # of a KL: as good is what loses no more than this; at 6 bits, 0.6 % of the bytes change it as much
SAME_SIZE = 0.02  # of the bytes: files that differ by less have one size
KEPT_PERPLEXITY = 0.02  # a plan that raises perplexity by no more keeps it
_QUANTILE = 0.975  # both ends of an interval of 95 %


@dataclass(frozen=True)
class Contender:
    """A plan or a file: its size and what it loses."""

    name: str
    bytes: int
    kl: float  # nats per token
    windows: Windows | None  # the same of each window

    @classmethod
    def on(cls, name: str, size: int, windows: Windows) -> Contender:
        return cls(name, size, float(windows.mean()), windows)

    def is_as_large_as(self, rival: Contender) -> bool:
        return abs(self.bytes - rival.bytes) <= SAME_SIZE * max(self.bytes, rival.bytes)


def paired_difference(windows: Windows, reference: Windows) -> Estimate:
    """KL of one subject minus that of another on the same windows; negative is better."""
    return mean(windows - reference)


def difference_of(subject: Contender, reference: Contender) -> Estimate:
    assert subject.windows is not None
    assert reference.windows is not None
    return paired_difference(subject.windows, reference.windows)


def interval(subject: Contender, reference: Contender) -> tuple[float, float]:
    """The ends of the 95 % confidence interval of the difference: Student's t, because windows are few. Unlimited if an
    error is not known."""
    difference = difference_of(subject, reference)
    error = difference.standard_error
    if subject.windows is None or not math.isfinite(error):  # also nan, of one window
        return -math.inf, math.inf
    reach = error * float(scipy.special.stdtrit(len(subject.windows) - 1, _QUANTILE))
    return difference.value - reach, difference.value + reach


# -- our plan against stock recipes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """Who is recommended, and how the rivals that are no larger than our plan compare with it."""

    ours: str
    winner: str
    windows: int
    worse: tuple[str, ...] = ()  # measurably
    beyond: tuple[str, ...] = ()  # as good, but not within the user's limit
    unknown: tuple[str, ...] = ()  # the text is too short to tell

    def sentence(self, same: str | None = None) -> str:
        """The result in words. `same`: the stock recipe that our plan is, which is not among the rivals."""
        if self.winner != self.ours:
            return (
                f"{self.winner} is no larger than our plan and not measurably worse (KL at most {100 * AS_GOOD:g} % "
                "higher), so it is recommended"
            )
        parts = [f"our plan is the same as {same}"] if same else []
        if self.worse:
            parts.append(
                f"lower KL than {_listed(self.worse)}, which {_are(self.worse)} no larger; the difference exceeds the "
                "measurement error"
            )
        if self.beyond:
            parts.append(
                f"{_listed(self.beyond)} {_are(self.beyond)} as good and no larger, but not within the limit"
            )
        if self.unknown:
            text = "1 window is" if self.windows == 1 else f"{self.windows} windows are"
            parts.append(
                f"{text} too short a text to tell whether {_listed(self.unknown)}, which {_are(self.unknown)} no "
                f"larger, {_are(self.unknown)} as good; our plan stays (more: --held-out-windows)"
            )
        return "; ".join(parts) or "all stock recipes are larger"


def contest(
    ours: Contender,
    rivals: Sequence[Contender],
    *,
    keeps: Callable[[Contender], bool] = lambda rival: True,
) -> Contest:
    """Recommends ours, or the best of the rivals that are no larger and not worse.

    Not worse: the confidence interval of the rival's KL minus ours begins at zero or below and ends within `AS_GOOD`.
    Every rival is compared with ours alone, so that small losses cannot add up from rival to rival. A rival that does
    not keep the user's limit cannot win.
    """
    worse: list[str] = []
    beyond: list[str] = []
    unknown: list[str] = []
    good = []
    for rival in rivals:
        if rival.bytes > ours.bytes:
            continue
        low, high = interval(rival, ours)
        if low > 0:
            worse.append(rival.name)
        elif not high <= AS_GOOD * ours.kl:  # True for nan
            unknown.append(rival.name)
        elif keeps(rival):
            good.append(rival)
        else:
            beyond.append(rival.name)
    best = min(good, key=lambda rival: (rival.kl, rival.bytes), default=ours)
    count = 0 if ours.windows is None else len(ours.windows)
    return Contest(
        ours.name, best.name, count, tuple(worse), tuple(beyond), tuple(unknown)
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


# -- a file beside its rivals --------------------------------------------------------------------------------


def nearest(subject: Contender, rivals: Sequence[Contender]) -> Contender | None:
    """The largest rival that is no larger; of those of one size, the best."""
    smaller = [rival for rival in rivals if rival.bytes <= subject.bytes]
    largest = max(smaller, key=lambda rival: rival.bytes, default=None)
    return _best_of_one_size(largest, smaller)


def next_larger(subject: Contender, rivals: Sequence[Contender]) -> Contender | None:
    """The smallest rival that is larger; of those of one size, the best."""
    larger = [rival for rival in rivals if rival.bytes > subject.bytes]
    smallest = min(larger, key=lambda rival: rival.bytes, default=None)
    return _best_of_one_size(smallest, larger)


def _best_of_one_size(
    rival: Contender | None, rivals: Sequence[Contender]
) -> Contender | None:
    level = [c for c in rivals if rival and c.is_as_large_as(rival)]
    return min(level, key=lambda level_rival: level_rival.kl, default=None)


def best_within(subject: Contender, rivals: Sequence[Contender]) -> Contender | None:
    """Of the rivals that are no larger, the best."""
    smaller = [rival for rival in rivals if rival.bytes <= subject.bytes]
    return min(smaller, key=lambda rival: rival.kl, default=None)


def deciding(subject: Contender, rivals: Sequence[Contender]) -> set[str]:
    """The rivals that prove what ours is worth: of those no larger the nearest and the best; the next larger one."""
    chosen = (rule(subject, rivals) for rule in (nearest, best_within, next_larger))
    return {rival.name for rival in chosen if rival is not None}


def closest(
    subject: Contender, rivals: Sequence[Contender], count: int
) -> list[Contender]:
    """As many rivals as a screen has room for, and ours: nearest in size, and of those that were judged first; large
    ones first."""
    order = sorted(
        rivals,
        key=lambda rival: (math.isnan(rival.kl), abs(rival.bytes - subject.bytes)),
    )
    return sorted([*order[:count], subject], key=lambda rival: -rival.bytes)


def smallest_that_keeps(
    subjects: Sequence[tuple[Contender, float]],
) -> Contender | None:
    """Without a recommendation: the smallest whose perplexity rises by no more than `KEPT_PERPLEXITY`. Each comes with
    that rise."""
    keeping = [subject for subject, rise in subjects if rise <= KEPT_PERPLEXITY]
    return min(keeping, key=lambda subject: subject.bytes, default=None)


def verdicts(files: Sequence[Contender]) -> Iterator[str]:
    """A sentence for every file beside the best of those that are no larger, if that is better or as large."""
    for file in files:
        rivals = [
            rival
            for rival in files
            if rival is not file
            and (rival.bytes <= file.bytes or rival.is_as_large_as(file))
        ]
        best = min(rivals, key=lambda rival: rival.kl, default=None)
        if best is None or (best.kl, best.name) > (file.kl, file.name):
            continue  # not beaten; its rivals of one size say so
        difference = difference_of(file, best)
        error = difference.standard_error
        bars = f" ± {error:.1g}" if math.isfinite(error) else ""
        apart = f"{difference.value:.2g}{bars} nats per token, paired by window"
        one_size = best.is_as_large_as(file)
        sizes = f"{human_bytes(best.bytes)} and {human_bytes(file.bytes)}"
        if interval(file, best)[0] > 0:
            why = "which has the same size" if one_size else "although it is smaller"
            yield f"{best.name} is better than {file.name}, {why} ({sizes}): its KL is lower by {apart}."
        else:
            equal = f"{best.name} and {file.name} have the same size"
            comparison = equal if one_size else f"{best.name} is smaller than {file.name}"
            yield f"{comparison} ({sizes}), and this text does not tell their KL apart: {apart}."
