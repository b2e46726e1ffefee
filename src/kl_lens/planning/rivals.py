"""Compares our plan with stock recipes on the same windows. We recommend ours only if no rival of the same size or
smaller is as good."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Windows = npt.NDArray[np.float64]  # mean KL of every window of a fixed text


@dataclass(frozen=True)
class PairedDifference:
    """KL of one plan minus that of another on the same windows; negative is better."""

    mean: float
    standard_error: float

    def better(self, z: float) -> bool:
        return self.mean < 0 and self.mean < -z * self.standard_error


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
    winner: str
    beaten: dict[str, PairedDifference]  # every rival that is no larger → the winner's KL minus the rival's

    def sentence(self, ours: str) -> str:
        """The result in words."""
        if self.winner != ours:
            return f"{self.winner} is no larger than our plan and not measurably worse, so it is recommended"
        if not self.beaten:
            return "all stock recipes are larger"
        names = " and ".join(filter(None, [", ".join([*self.beaten][:-1]), [*self.beaten][-1]]))
        are = "are" if len(self.beaten) > 1 else "is"
        return f"lower KL than {names}, which {are} no larger; the difference exceeds the measurement error"


def paired_difference(windows: Windows, reference: Windows) -> PairedDifference:
    difference = windows - reference
    if len(difference) < 2:
        return PairedDifference(float(difference.mean()), math.inf)
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return PairedDifference(float(difference.mean()), error)


def contest(
    ours: Contender,
    rivals: Sequence[Contender],
    *,
    z: float = 2.0,
    keeps: Callable[[Contender], bool] | None = None,
) -> Contest:
    """Recommends ours, unless a rival that is no larger is not measurably worse.

    Args:
        z: standard errors of the paired difference by which a winner must be better.
        keeps: whether a rival is within the user's limit; only then can it win.
    """
    best, open_ = ours, [rival for rival in rivals if keeps is None or keeps(rival)]
    while challengers := [
        rival
        for rival in open_
        if rival.bytes <= best.bytes and not paired_difference(best.windows, rival.windows).better(z)
    ]:
        best = min(challengers, key=lambda rival: rival.kl)
        open_.remove(best)
    smaller = [rival for rival in rivals if rival.bytes <= best.bytes and rival is not best]
    return Contest(best.name, {r.name: paired_difference(best.windows, r.windows) for r in smaller})
