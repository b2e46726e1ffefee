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
from kl_lens.evaluation.texts import EvaluationText, Window
from kl_lens.measuring.metrics import KL_TEACHER_STUDENT, SAME_TOP, TeacherRows, compare
from kl_lens.model.tasks import TEXT
from kl_lens.run.positions import by_position
from kl_lens.run.records import Estimate, Record
from kl_lens.run.samples import Floats, ratio
from kl_lens.targets.session import Logits, Session


@dataclass(frozen=True)
class WindowScore(Record):
    """What the journal stores per window."""

    targets: int
    words: int
    nll: float  # Σ −ln p(token | context), nats
    token_nll: str  # −ln p of every token, float32, base64
    correct: float = 0.0  # rows with the right class
    same_top: float | None = None  # tokens with the same most likely token as the original
    token_kl: str | None = None  # KL(original ‖ this) of every token, float32, base64
    seconds: float = 0.0

    def kl(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_kl or ""), np.float32)

    def losses(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.token_nll), np.float32)


def packed(values: npt.NDArray[np.floating[Any]]) -> str:
    """As `token_kl` and `token_nll` are stored."""
    return base64.b64encode(values.astype(np.float32).tobytes()).decode("ascii")


def score_logits(logits: Logits, window: Window, teacher: Logits | None = None) -> WindowScore:
    """Scores a window from its logits; with the original's also the KL from it."""
    targets = torch.tensor(window.answers)
    student = _rows(logits, window)
    likelihood = TeacherRows.of(torch.from_numpy(student), targets)
    losses, correct = likelihood.cross_entropy, float((likelihood.top == targets).sum())
    same_top, kl = None, None
    if teacher is not None:
        original = _rows(teacher, window)
        if original.shape != student.shape:
            raise TargetError(
                f"its logits have {student.shape[1]} columns, the original's have {original.shape[1]}; "
                "KL needs the same vocabulary"
            )
        comparison = compare(TeacherRows.of(torch.from_numpy(original), targets), torch.from_numpy(student))
        same_top, kl = float(comparison[:, SAME_TOP].sum()), packed(comparison[:, KL_TEACHER_STUDENT])
    nll = float(losses.sum())
    return WindowScore(window.targets, window.words, nll, packed(losses.numpy()), correct, same_top, kl)


def _rows(logits: Logits, window: Window) -> Logits:
    """The logits that predict the scored tokens or classes."""
    logits = logits[window.rows]
    # The kernels are compiled for finite numbers.
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise TargetError("its logits are not finite; its weights or scales are damaged")
    return np.ascontiguousarray(logits)


def score_text(session: Session, text: EvaluationText, teacher: Session | None = None) -> list[WindowScore]:
    """Scores all windows, without a journal."""
    both = (
        (w, session.logits(w.ids), None if teacher is None else teacher.logits(w.ids)) for w in text.items
    )
    return [score_logits(own, window, original) for window, own, original in both]


def likelihood_values(
    scores: Sequence[WindowScore], original: Sequence[WindowScore] | None = None, task: str = TEXT
) -> dict[str, Estimate]:
    """Cross-entropy; of text the perplexity per token and per word, of images top-1 and the perplexity per image. With
    the original's scores also the change of each."""
    perplexities = {"token": "targets", "word": "words"} if task == TEXT else {"token": "targets"}
    means = {"cross_entropy": "nll"} if task == TEXT else {"top1": "correct", "cross_entropy": "nll"}
    nll, targets = _column(scores, "nll"), _column(scores, "targets")
    values = {}
    for name, counted in perplexities.items():
        counts = _column(scores, counted)
        values[f"{name}_perplexity"] = statistics.perplexity(nll, counts)
        if original is not None:
            change = statistics.perplexity_change(nll, _column(original, "nll"), counts)
            values[f"{name}_perplexity_change"] = change
    for name, summed in means.items():
        values[name] = ratio(_column(scores, summed), targets)
        if original is not None:
            values[f"{name}_change"] = ratio(_column(scores, summed) - _column(original, summed), targets)
    return values


def divergence_values(scores: Sequence[WindowScore]) -> dict[str, Estimate]:
    """KL from the original over tokens, in nats, and how often the most likely token is the same."""
    kl = [score.kl() for score in scores]
    shares = {"kl_median": 0.5, "kl_p99": 0.99, "kl_p999": 0.999}
    return {
        "kl_mean": mean_kl(scores),
        **{name: statistics.quantile(kl, share) for name, share in shares.items()},
        "kl_max": Estimate(float(max(window.max() for window in kl))),
        "same_top": ratio(_column(scores, "same_top"), _column(scores, "targets")),
    }


def mean_kl(scores: Sequence[WindowScore]) -> Estimate:
    sums = np.array([float(score.kl().sum(dtype=np.float64)) for score in scores])
    return ratio(sums, _column(scores, "targets"))


def position_values(scores: Sequence[WindowScore], *, divergence: bool) -> dict[str, Estimate]:
    """Cross-entropy and KL from the original in each bin of positions, and their slopes."""
    values = by_position([score.losses() for score in scores]).values("cross_entropy")
    return values | (by_position([score.kl() for score in scores]).values("kl") if divergence else {})


def _column(scores: Sequence[WindowScore], name: str) -> Floats:
    return np.array([getattr(score, name) for score in scores], float)
