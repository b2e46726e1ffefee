"""Scores one window: the likelihood of its tokens or classes, and the KL from the original.

The only place where logits become numbers, for all runtimes. It needs one window's logits of each of the two models.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.errors import TargetError
from kl_lens.evaluation import statistics
from kl_lens.evaluation.texts import EvaluationText, ImageWindow, TextWindow
from kl_lens.measuring.metrics import KL_TEACHER_STUDENT, SAME_TOP, TeacherRows, compare
from kl_lens.model.tasks import IMAGE, TEXT
from kl_lens.run.positions import binned, by_position, curve
from kl_lens.run.records import Estimate, Record
from kl_lens.targets.session import Logits, Session


@dataclass(frozen=True)
class WindowScore(Record):
    """What the journal stores per window: sums over its scored tokens."""

    targets: int
    words: int
    nll: float  # Σ −ln p(token | context), nats
    same_top: float | None = None  # tokens with the same most likely token as the original
    token_kl: str | None = None  # KL(original ‖ this) of every token, float32, base64
    seconds: float = 0.0
    correct: float | None = None  # rows with the right class
    nll_bins: tuple[float, ...] | None = None  # `nll` by position, see `positions.py`
    token_nll: str | None = None  # −ln p of every token, float32, base64

    def kl(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_kl or ""), np.float32)

    def losses(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_nll or ""), np.float32)


def packed(values: npt.NDArray[np.floating[Any]]) -> str:
    """As `token_kl` and `token_nll` are stored."""
    return base64.b64encode(values.astype(np.float32).tobytes()).decode("ascii")


Window = TextWindow | ImageWindow


def score_window(session: Session, window: Window, teacher: Session | None = None) -> WindowScore:
    """Scores a window; with a teacher (the original model) also the KL from it."""
    own = session.logits(window.ids)
    return score_logits(own, window, None if teacher is None else teacher.logits(window.ids))


def score_logits(logits: Logits, window: Window, teacher: Logits | None = None) -> WindowScore:
    """Scores a window from its logits."""
    targets = torch.tensor(window.answers)
    student = _rows(logits, window)
    likelihood = TeacherRows.of(torch.from_numpy(student), targets)
    losses = likelihood.cross_entropy
    nll, bins = float(losses.sum()), tuple(binned(losses.numpy()).tolist())
    more: dict[str, Any] = {
        "correct": float((likelihood.top == targets).sum()), "nll_bins": bins, "token_nll": packed(losses.numpy()),
    }  # fmt: skip
    if teacher is None:
        return WindowScore(window.targets, window.words, nll, **more)
    original = _rows(teacher, window)
    if original.shape != student.shape:
        raise TargetError(
            f"its logits have {student.shape[1]} columns, the original's have {original.shape[1]}; "
            "KL needs the same vocabulary"
        )
    comparison = compare(TeacherRows.of(torch.from_numpy(original), targets), torch.from_numpy(student))
    same_top, kl = float(comparison[:, SAME_TOP].sum()), packed(comparison[:, KL_TEACHER_STUDENT])
    return WindowScore(window.targets, window.words, nll, same_top, kl, **more)


def _rows(logits: Logits, window: Window) -> Logits:
    """The logits that predict the scored tokens or classes."""
    logits = logits[window.rows]
    # The kernels are compiled for finite numbers.
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise TargetError("its logits are not finite; its weights or scales are damaged")
    return np.ascontiguousarray(logits)


def perplexity_values(
    scores: Sequence[WindowScore], original: Sequence[WindowScore] | None = None
) -> dict[str, Estimate]:
    """Token and word perplexity; with the original's scores also the change."""
    nll, tokens, words = _column(scores, "nll"), _column(scores, "targets"), _column(scores, "words")
    values = {
        "token_perplexity": statistics.perplexity(nll, tokens),
        "word_perplexity": statistics.perplexity(nll, words),
        "cross_entropy": statistics.ratio(nll, tokens),
    }
    if original is not None:
        base = _column(original, "nll")
        values["token_perplexity_change"] = statistics.perplexity_change(nll, base, tokens)
        values["word_perplexity_change"] = statistics.perplexity_change(nll, base, words)
        values["cross_entropy_change"] = statistics.ratio(nll - base, tokens)
    return values


def classification_values(
    scores: Sequence[WindowScore], original: Sequence[WindowScore] | None = None
) -> dict[str, Estimate]:
    """Top-1, cross-entropy and perplexity; with the original's scores also the change."""
    nll, images, correct = _column(scores, "nll"), _column(scores, "targets"), _column(scores, "correct")
    values = {
        "top1": statistics.ratio(correct, images),
        "token_perplexity": statistics.perplexity(nll, images),  # per image
        "cross_entropy": statistics.ratio(nll, images),
    }
    if original is not None:
        base = _column(original, "nll")
        values["top1_change"] = statistics.ratio(correct - _column(original, "correct"), images)
        values["token_perplexity_change"] = statistics.perplexity_change(nll, base, images)
        values["cross_entropy_change"] = statistics.ratio(nll - base, images)
    return values


# The reported values for each task.
LIKELIHOOD_VALUES = {TEXT: perplexity_values, IMAGE: classification_values}


def divergence_values(scores: Sequence[WindowScore]) -> dict[str, Estimate]:
    """KL from the original over tokens, in nats, and how often the most likely token is the same."""
    kl = [score.kl() for score in scores]
    tokens = _column(scores, "targets")
    return {
        "kl_mean": statistics.ratio(np.array([window.sum(dtype=np.float64) for window in kl]), tokens),
        "kl_median": statistics.quantile(kl, 0.5),
        "kl_p99": statistics.quantile(kl, 0.99),
        "kl_p999": statistics.quantile(kl, 0.999),
        "kl_max": Estimate(float(max(window.max() for window in kl))),
        "same_top": statistics.ratio(_column(scores, "same_top"), tokens),
    }


def position_values(scores: Sequence[WindowScore], *, divergence: bool) -> dict[str, Estimate]:
    """Cross-entropy and KL from the original in each bin of positions, and their slopes."""
    values: dict[str, Estimate] = {}
    bins = [np.array(score.nll_bins) for score in scores if score.nll_bins]  # older versions stored none
    if len(bins) == len(scores):
        values |= curve(bins, scores[0].targets).values("cross_entropy")
    return values | (by_position([score.kl() for score in scores]).values("kl") if divergence else {})


def score_text(session: Session, text: EvaluationText, teacher: Session | None = None) -> list[WindowScore]:
    """Scores all windows, without a journal."""
    return [score_window(session, window, teacher) for window in text.items]


def _column(scores: Sequence[WindowScore], name: str) -> statistics.Floats:
    return np.array([getattr(score, name) for score in scores], float)
