"""Is the exported file what was measured? Compares it with the same weights in PyTorch, on the first windows of a text.

The rule. Both models read the same tokens, so equal weights and equal arithmetic would give equal numbers on every
window; how much the text varies plays no part. Two differences are checked, paired by token: cross-entropy, and KL from
the original, which sees changes that leave the perplexity alone, and cannot cancel. Rounding that differs from token to
token scatters around zero: a difference within three of its own standard errors is such scatter, and may be ten times
as large. The scatter is that of stretches of eight tokens, because four windows alone would say little about it.

Runtimes round activations to 8 bits for their integer kernels, which is a real loss and not the file's fault. So the
file is first compared with PyTorch as deployed, where those kernels are modelled (`Target.activations`), then with
plain PyTorch, then both in float32. If all fail and our kernels in PyTorch are right, it is not what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from kl_lens.evaluation.scoring import WindowScore
from kl_lens.run.records import Estimate, Record, Subject
from kl_lens.run.samples import ratio

WINDOWS = 4  # of the text; a wrong weight shows in each of them
CROSS_ENTROPY_FLOOR = 1e-3  # nats per token
KL_FLOOR = 1e-4  # nats per token
KL_SHARE = 0.02
SCATTER = 10.0  # how many times larger scatter may be
STRETCH = 8  # tokens
_THREE_SIGMA = 0.99865  # one-sided

Tokens = npt.NDArray[np.float32]

AGREES, AS_DEPLOYED, DISAGREES = "agrees", "agrees as deployed", "DISAGREES"
IN_FLOAT32 = "agrees in float32"


@dataclass(frozen=True)
class Agreement(Record):
    """The comparison of an artifact with its PyTorch counterpart."""

    subject: Subject
    counterpart: Subject  # the same weights in PyTorch
    compared_with: Subject  # what decided: the counterpart, the same as deployed, or the file in float32
    what: str  # the text
    verdict: str
    differences: dict[str, Estimate]  # artifact minus counterpart: cross_entropy, kl_mean


def differences(
    artifact: Sequence[WindowScore], counterpart: Sequence[WindowScore]
) -> dict[str, tuple[Estimate, float]]:
    """Each difference, paired by token, and its limit."""
    ours, theirs = ([score.losses() for score in scores] for scores in (artifact, counterpart))
    changes = {"cross_entropy": _judged(ours, theirs, CROSS_ENTROPY_FLOOR)}
    if all(score.token_kl is not None for score in (*artifact, *counterpart)):
        ours, theirs = ([score.kl() for score in scores] for scores in (artifact, counterpart))
        changes["kl_mean"] = _judged(ours, theirs, KL_FLOOR + KL_SHARE * float(np.concatenate(theirs).mean()))
    return changes


def within(changes: Mapping[str, tuple[Estimate, float]]) -> bool:
    return all(abs(change.value) <= limit for change, limit in changes.values())


def _judged(ours: Sequence[Tokens], theirs: Sequence[Tokens], floor: float) -> tuple[Estimate, float]:
    """The mean difference of all tokens, and its limit."""
    sums, sizes = [], []
    for one, other in zip(ours, theirs, strict=True):
        starts = STRETCH * np.arange(max(1, len(one) // STRETCH))  # the last stretch takes what is left over
        sums.append(np.add.reduceat(one.astype(float) - other, starts))
        sizes.append(np.diff([*starts, len(one)]).astype(float))
    change = ratio(np.concatenate(sums), np.concatenate(sizes))
    stretches = sum(map(len, sums))
    if stretches < 2:  # too little to tell scatter from a difference
        return change, SCATTER * floor
    scatter = float(stdtrit(stretches - 1, _THREE_SIGMA)) * change.standard_error
    return change, min(max(floor, scatter), SCATTER * floor)
