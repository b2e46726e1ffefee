"""Is the exported file what was measured? Compares it with the same weights in PyTorch, on the first windows of a text.

The rule. Both models read the same tokens, so equal weights and equal arithmetic would give equal numbers on every
window; how much the text varies plays no part. Two differences are checked, paired by window:

- cross-entropy: at most 0.001 nats per token (0.1 % of the perplexity);
- KL from the original, if measured: at most 2 % of PyTorch's KL plus 0.0001 nats. KL sees changes that leave the
  perplexity alone, and it cannot cancel.

Rounding that differs from token to token scatters around zero. A difference within three of its own standard errors
(more with few windows, by Student's t) is such scatter, and may be up to twenty times as large as the limits above. A
single window cannot tell the two apart, and may also differ that much.

Runtimes round activations to 8 bits for their integer kernels, which is a real and significant loss and not the file's
fault. So PyTorch computes with the activations that the runtime's kernels see, where they are modelled
(`Target.activations`). If both hold, the file *agrees as deployed*: it holds the measured weights. If not, or without
such a model, PyTorch computes plainly; if both hold then, the file *agrees*. If that does not settle it (half-precision
arithmetic, kernels that are not modelled), the runtime computes the same file in float32 if it can; if the rule holds
then, the file *agrees in float32*. Otherwise it *DISAGREES*: the file is not what was measured. The models' own
standard errors are shown but decide nothing: they are errors of the text, ten and more times larger than the effect of
a wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from kl_lens.evaluation import statistics
from kl_lens.evaluation.scoring import WindowScore
from kl_lens.records import Estimate, Record, Subject

WINDOWS = 4  # of the text; a wrong weight shows in each of them
CROSS_ENTROPY_FLOOR = 1e-3  # nats per token
KL_FLOOR = 1e-4  # nats per token
KL_SHARE = 0.02
SCATTER = 20.0  # how many times larger scatter may be
_THREE_SIGMA = 0.99865  # one-sided

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
    """Each difference, paired by window, and its limit."""
    tokens = np.array([float(score.targets) for score in artifact])

    def paired(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
        return statistics.ratio(np.array(ours) - np.array(theirs), tokens)

    change = paired([s.nll for s in artifact], [s.nll for s in counterpart])
    changes = {"cross_entropy": (change, _limit(change, CROSS_ENTROPY_FLOOR, len(tokens)))}
    if all(score.token_kl is not None for score in (*artifact, *counterpart)):
        ours, theirs = (
            [float(s.kl().sum(dtype=float)) for s in scores] for scores in (artifact, counterpart)
        )
        change = paired(ours, theirs)
        floor = KL_FLOOR + KL_SHARE * sum(theirs) / float(tokens.sum())
        changes["kl_mean"] = (change, _limit(change, floor, len(tokens)))
    return changes


def within(changes: Mapping[str, tuple[Estimate, float]]) -> bool:
    return all(abs(change.value) <= limit for change, limit in changes.values())


def _limit(change: Estimate, floor: float, windows: int) -> float:
    if math.isnan(change.standard_error):  # one window cannot tell scatter from a difference
        return SCATTER * floor
    return min(max(floor, float(stdtrit(windows - 1, _THREE_SIGMA)) * change.standard_error), SCATTER * floor)
