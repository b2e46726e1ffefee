"""Scores one window (the likelihood of its tokens or classes, and the KL from the original), errors over windows, and
whether a file is what was measured. The only place where logits become numbers, for all runtimes.

Tokens of one window share context and topic, so they are not independent; windows are. So every error over text is an
error over windows. Comparisons take the difference window by window (or example by example) first, so that what is hard
for both models cancels.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import stdtrit

from kl_lens.base.errors import TargetError
from kl_lens.judging.texts import EvaluationText, Window
from kl_lens.measuring.metrics import KL_TEACHER_STUDENT, SAME_TOP, TeacherRows, compare
from kl_lens.model.tasks import TEXT
from kl_lens.run.records import Estimate, Record, Subject
from kl_lens.run.samples import Floats, by_position, ratio, ratio_error
from kl_lens.targets.session import Logits, Session

Tokens = npt.NDArray[np.float32]
_LARGEST_EXPONENT = 700.0  # e^709 is the largest double; a destroyed model may exceed it


@dataclass(frozen=True)
class WindowScore(Record):
    """What the journal stores per window."""

    targets: int
    words: int
    nll: float  # Σ −ln p(token | context), nats
    token_nll: str  # −ln p of every token, float32, base64
    correct: float = 0.0  # rows with the right class
    same_top: float | None = (
        None  # tokens with the same most likely token as the original
    )
    token_kl: str | None = None  # KL(original ‖ this) of every token, float32, base64
    seconds: float = 0.0

    def kl(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_kl or ""), np.float32)

    def losses(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_nll), np.float32)


def packed(values: npt.NDArray[np.floating[Any]]) -> str:
    """As `token_kl` and `token_nll` are stored."""
    return base64.b64encode(values.astype(np.float32).tobytes()).decode("ascii")


def score_logits(
    logits: Logits, window: Window, teacher: Logits | None = None
) -> WindowScore:
    """Scores a window from its logits; with the original's also the KL from it."""
    targets = torch.tensor(window.answers)
    student = _rows(logits, window)
    likelihood = TeacherRows.of(torch.from_numpy(student), targets)
    losses = likelihood.cross_entropy
    correct = float((likelihood.top == targets).sum())
    same_top = None
    kl = None
    if teacher is not None:
        original = _rows(teacher, window)
        if original.shape != student.shape:
            raise TargetError(
                f"its logits have {student.shape[1]} columns, the original's have {original.shape[1]}; "
                "KL needs the same vocabulary"
            )
        comparison = compare(
            TeacherRows.of(torch.from_numpy(original), targets), torch.from_numpy(student)
        )
        same_top = float(comparison[:, SAME_TOP].sum())
        kl = packed(comparison[:, KL_TEACHER_STUDENT])
    nll = float(losses.sum())
    return WindowScore(
        window.targets, window.words, nll, packed(losses.numpy()), correct, same_top, kl
    )


def _rows(logits: Logits, window: Window) -> Logits:
    """The logits that predict the scored tokens or classes."""
    logits = logits[window.rows]
    # The kernels are compiled for finite numbers.
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise TargetError("its logits are not finite; its weights or scales are damaged")
    return np.ascontiguousarray(logits)


def score_text(
    session: Session, text: EvaluationText, teacher: Session | None = None
) -> list[WindowScore]:
    """Scores all windows, without a journal."""
    both = (
        (w, session.logits(w.ids), None if teacher is None else teacher.logits(w.ids))
        for w in text.items
    )
    return [score_logits(own, window, original) for window, own, original in both]


def likelihood_values(
    scores: Sequence[WindowScore],
    original: Sequence[WindowScore] | None = None,
    task: str = TEXT,
) -> dict[str, Estimate]:
    """Cross-entropy; of text the perplexity per token and per word, of images top-1 and the perplexity per image. With
    the original's scores also the change of each."""
    perplexities = (
        {"token": "targets", "word": "words"} if task == TEXT else {"token": "targets"}
    )
    means = (
        {"cross_entropy": "nll"}
        if task == TEXT
        else {"top1": "correct", "cross_entropy": "nll"}
    )
    nll = _column(scores, "nll")
    targets = _column(scores, "targets")
    values = {}
    for name, counted in perplexities.items():
        counts = _column(scores, counted)
        values[f"{name}_perplexity"] = perplexity(nll, counts)
        if original is not None:
            change = perplexity_change(nll, _column(original, "nll"), counts)
            values[f"{name}_perplexity_change"] = change
    for name, summed in means.items():
        values[name] = ratio(_column(scores, summed), targets)
        if original is not None:
            values[f"{name}_change"] = ratio(
                _column(scores, summed) - _column(original, summed), targets
            )
    return values


def divergence_values(scores: Sequence[WindowScore]) -> dict[str, Estimate]:
    """KL from the original over tokens, in nats, and how often the most likely token is the same."""
    kl = [score.kl() for score in scores]
    shares = {"kl_median": 0.5, "kl_p99": 0.99, "kl_p999": 0.999}
    return {
        "kl_mean": mean_kl(scores),
        **{name: quantile(kl, share) for name, share in shares.items()},
        "kl_max": Estimate(float(max(window.max() for window in kl))),
        "same_top": ratio(_column(scores, "same_top"), _column(scores, "targets")),
    }


def mean_kl(scores: Sequence[WindowScore]) -> Estimate:
    sums = np.array([float(score.kl().sum(dtype=np.float64)) for score in scores])
    return ratio(sums, _column(scores, "targets"))


def position_values(
    scores: Sequence[WindowScore], *, divergence: bool
) -> dict[str, Estimate]:
    """Cross-entropy and KL from the original in each bin of positions, and their slopes."""
    values = by_position([score.losses() for score in scores]).values("cross_entropy")
    return values | (
        by_position([score.kl() for score in scores]).values("kl") if divergence else {}
    )


def _column(scores: Sequence[WindowScore], name: str) -> Floats:
    return np.array([getattr(score, name) for score in scores], float)


# -- statistics ---------------------------------------------------------------------------------------------


def perplexity(nll: Floats, weights: Floats) -> Estimate:
    """exp of the mean negative log-likelihood per token (or word), by the delta method."""
    mean = ratio(nll, weights)
    value = _exp(mean.value)
    return Estimate(value, value * mean.standard_error)


def perplexity_change(nll: Floats, original: Floats, weights: Floats) -> Estimate:
    """Perplexity minus the original's on the same windows, with a paired error."""
    ours = ratio(nll, weights).value
    theirs = ratio(original, weights).value
    residuals = _exp(ours) * (nll - ours * weights) - _exp(theirs) * (
        original - theirs * weights
    )
    return Estimate(_exp(ours) - _exp(theirs), ratio_error(residuals, weights))


def quantile(windows: Sequence[npt.NDArray[np.float32]], share: float) -> Estimate:
    """A quantile over all tokens, with Woodruff's error.

    The share of tokens below the quantile has a plain standard error over windows. Half the distance between the
    quantiles at share ± that error is the error of the quantile. If share + error passes 1, or fewer than one token is
    expected beyond the quantile, the text is too short and no error is given.
    """
    tokens = np.concatenate(windows)
    value = float(np.quantile(tokens, share))
    below = np.array([float((window <= value).sum()) for window in windows])
    error = ratio(
        below, np.array([float(len(window)) for window in windows])
    ).standard_error
    known = (
        share - error > 0 and share + error < 1 and len(tokens) * (1 - share) >= 1
    )  # False for nan
    if not known:
        return Estimate(value)
    low, high = np.quantile(tokens, [share - error, share + error])
    return Estimate(value, float(high - low) / 2)


def mean(values: Floats) -> Estimate:
    """The mean over examples with its standard error."""
    return ratio(values, np.ones(len(values)))


def paired_drop(before: Floats, after: Floats) -> Estimate:
    """The mean of `before` − `after` on the same examples, with its standard error.

    If every example is right or wrong, the error is that of Agresti and Min: half an example is added to each of the
    four outcomes. Two models that agree on all of forty examples may still differ by some percent; the plain formula
    would claim an error of zero.
    """
    change = before - after
    if not np.isin(np.concatenate([before, after]), (0.0, 1.0)).all():
        return mean(change)
    count = len(change) + 2
    differing = float((change != 0).sum()) + 1
    balance = float(change.sum())
    return Estimate(
        float(change.mean()), math.sqrt(differing - balance**2 / count) / count
    )


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))


# -- is the exported file what was measured? -----------------------------------------------------------------
#
# A file is compared with the same weights in PyTorch, on the first windows of a text. Both models read the same tokens,
# so equal weights and equal arithmetic would give equal numbers on every window; how much the text varies plays no
# part. Two differences are checked, paired by token: cross-entropy, and KL from the original, which sees changes that
# leave the perplexity alone, and cannot cancel. Rounding that differs from token to token scatters around zero: a
# difference within five of its own standard errors is such scatter, and may be ten times as large. The scatter is that
# of stretches of eight tokens, because four windows alone would say little about it; recurrent states carry rounding
# farther, so it is a little too small (on x86 a right file of `reference:mamba` was 3.8 of them away).
#
# Runtimes round activations to 8 bits for their integer kernels, which is a real loss and not the file's fault. So the
# file is first compared with PyTorch as deployed, where those kernels are modelled (`Target.activations`), then with
# plain PyTorch, then both in float32. If all fail and our kernels in PyTorch are right, it is not what was measured.

COMPARED_WINDOWS = 4  # of the text; a wrong weight shows in each of them
CROSS_ENTROPY_FLOOR = 1e-3  # nats per token
KL_FLOOR = 1e-4  # nats per token
KL_SHARE = 0.02
SCATTER = 10.0  # how many times larger scatter may be
STRETCH = 8  # tokens
_FIVE_SIGMA = 1 - 2.87e-7  # one-sided

AGREES = "agrees"
AS_DEPLOYED = "agrees as deployed"
DISAGREES = "DISAGREES"
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
    ours, theirs = (
        [score.losses() for score in scores] for scores in (artifact, counterpart)
    )
    changes = {"cross_entropy": _judged(ours, theirs, CROSS_ENTROPY_FLOOR)}
    if all(score.token_kl is not None for score in (*artifact, *counterpart)):
        ours, theirs = (
            [score.kl() for score in scores] for scores in (artifact, counterpart)
        )
        changes["kl_mean"] = _judged(
            ours, theirs, KL_FLOOR + KL_SHARE * float(np.concatenate(theirs).mean())
        )
    return changes


def within(changes: Mapping[str, tuple[Estimate, float]]) -> bool:
    return all(abs(change.value) <= limit for change, limit in changes.values())


def _judged(
    ours: Sequence[Tokens], theirs: Sequence[Tokens], floor: float
) -> tuple[Estimate, float]:
    """The mean difference of all tokens, and its limit."""
    sums = []
    sizes = []
    for one, other in zip(ours, theirs, strict=True):
        starts = STRETCH * np.arange(
            max(1, len(one) // STRETCH)
        )  # the last stretch takes what is left over
        sums.append(np.add.reduceat(one.astype(float) - other, starts))
        sizes.append(np.diff([*starts, len(one)]).astype(float))
    change = ratio(np.concatenate(sums), np.concatenate(sizes))
    stretches = sum(map(len, sums))
    if stretches < 2:  # too little to tell scatter from a difference
        return change, SCATTER * floor
    scatter = float(stdtrit(stretches - 1, _FIVE_SIGMA)) * change.standard_error
    return change, min(max(floor, scatter), SCATTER * floor)
