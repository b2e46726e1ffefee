"""Compares our plan with stock recipes on the same windows. A rival replaces ours only if it is no larger and is known
not to be worse; what the text is too short to tell decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts load on first use

from kl_lens.planning.predict import stored_recipe
from kl_lens.planning.problem import Problem, bytes_for
from kl_lens.weights.recipes import Recipe

Windows = npt.NDArray[np.float64]  # mean KL of every window of a fixed text
LEVEL = 0.05  # of our KL: what a rival may lose more and be as good; at 6 bits, 0.6 % of the bytes change it as much
_QUANTILE = 0.975  # both ends of an interval of 95 %


@dataclass(frozen=True)
class PairedDifference:
    """KL of one plan minus that of another on the same windows; negative is better."""

    mean: float
    standard_error: float  # infinite for one window
    windows: int = 1

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % confidence interval: Student's t, because windows are few. Unlimited if an error is not
        known."""
        if (
            self.windows < 2
            or not math.isfinite(self.mean)
            or not math.isfinite(self.standard_error)
        ):
            return -math.inf, math.inf
        reach = (
            float(scipy.special.stdtrit(self.windows - 1, _QUANTILE))
            * self.standard_error
        )
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Contender:
    """A plan with the size of its file and its KL on each window."""

    name: str
    bytes: int
    windows: Windows

    @property
    def kl(self) -> float:
        return float(self.windows.mean())


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
                f"{self.winner} is no larger than our plan and not measurably worse (KL at most {100 * LEVEL:g} % "
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


def paired_difference(windows: Windows, reference: Windows) -> PairedDifference:
    difference = windows - reference
    count = len(difference)
    error = float(difference.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return PairedDifference(float(difference.mean()), error, count)


def contest(
    ours: Contender,
    rivals: Sequence[Contender],
    *,
    keeps: Callable[[Contender], bool] = lambda rival: True,
) -> Contest:
    """Recommends ours, or the best of the rivals that are no larger and not worse.

    Not worse: the confidence interval of the rival's KL minus ours begins at zero or below and ends within `LEVEL`.
    Every rival is compared with ours alone, so that small losses cannot add up from rival to rival. A rival that does
    not keep the user's limit cannot win.
    """
    found: dict[str, list[Contender]] = {
        "worse": [],
        "good": [],
        "beyond": [],
        "unknown": [],
    }
    for rival in rivals:
        if rival.bytes > ours.bytes:
            continue
        low, high = paired_difference(rival.windows, ours.windows).interval
        if low > 0:
            found["worse"].append(rival)
        elif high <= LEVEL * ours.kl:
            found["good" if keeps(rival) else "beyond"].append(rival)
        else:
            found["unknown"].append(rival)
    best = min(found.pop("good"), key=lambda rival: (rival.kl, rival.bytes), default=ours)
    named = {kind: tuple(rival.name for rival in each) for kind, each in found.items()}
    return Contest(ours.name, best.name, len(ours.windows), **named)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def stock_with_our_methods(
    problem: Problem, stock: Sequence[Mapping[str, Recipe]]
) -> list[dict[str, Recipe]]:
    """A target's stock recipes with our methods: each component gets the recipe with the least damage that is no
    larger than the stock recipe's.

    `problem`: without groups, because fused siblings may differ here. A stock recipe smaller than anything measured is
    left out.
    """
    by_name = {c.name: c for c in problem.table.components}
    found = []
    for one in stock:
        sizes = {
            name: bytes_for(
                by_name[name], stored_recipe(by_name[name], recipe)[0], problem.target
            )
            for name, recipe in one.items()
        }
        fitting = {
            group.members[0]: [
                c
                for c in group.choices
                if c.bytes <= sizes.get(group.members[0], math.inf)
            ]
            for group in problem.groups
        }
        if all(fitting.values()):
            found.append(
                {
                    name: min(each, key=lambda c: (c.kl, c.bytes)).recipe
                    for name, each in fitting.items()
                }
            )
    return found
