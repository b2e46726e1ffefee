"""Ours against the mixtures that everybody knows, on the same windows: never worse at no more bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Windows = npt.NDArray[np.float64]  # mean KL of every window of a fixed text


@dataclass(frozen=True)
class PairedDifference:
    """KL of one plan less that of another on the same windows; negative is better."""

    mean: float
    standard_error: float

    def better(self, z: float) -> bool:
        return self.mean < 0 and self.mean < -z * self.standard_error


@dataclass(frozen=True)
class Contender:
    """A plan in the contest: how large its file is, and what it loses on each window."""

    name: str
    bytes: int
    windows: Windows

    @property
    def kl(self) -> float:
        return float(self.windows.mean())


@dataclass(frozen=True)
class Contest:
    winner: str
    beaten: dict[str, PairedDifference]  # every rival of no more bytes → the winner's KL less the rival's

    def sentence(self, ours: str) -> str:
        """For people: who won, against whom."""
        if self.winner != ours:
            return (
                f"{self.winner} is no larger than our own plan and not measurably worse, so it is recommended"
            )
        if not self.beaten:
            return "no rival is as small"
        return (
            f"measured KL is lower, beyond its error, than that of {', '.join(self.beaten)}, of no more bytes"
        )


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
    """Who is to be recommended: ours, unless a rival of no more bytes is not measurably worse.

    Args:
        z: standard errors of the paired difference by which a winner must be better.
        keeps: whether a contender keeps the limit that was asked for; a rival that does not cannot win.
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
