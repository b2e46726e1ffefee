"""Scores one window (the likelihood of its tokens or classes, and the KL from the original), and whether a file is
what was measured. The only place where logits become numbers, for all runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import stdtrit

from kl_lens.base.errors import TargetError
from kl_lens.judging.texts import EvaluationText, Window
from kl_lens.measuring.metrics import KL_TEACHER_STUDENT, TeacherRows, compare, named_sums
from kl_lens.run.positions import by_position
from kl_lens.run.readings import CORRECT, KL, NLL, WORDS, Reading, packed, paired_by_token
from kl_lens.run.records import Estimate, Record, Subject
from kl_lens.targets.session import Logits, Session


def score_logits(
    logits: Logits, window: Window, teacher: Logits | None = None, index: int = 0
) -> Reading:
    """Scores a window from its logits; with the original's also against those."""
    targets = torch.tensor(window.answers)
    student = _rows(logits, window)
    likelihood = TeacherRows.of(torch.from_numpy(student), targets)
    losses = likelihood.cross_entropy
    sums = {
        NLL: float(losses.sum()),
        CORRECT: float((likelihood.top == targets).sum()),
        WORDS: float(window.words),
    }
    arrays = {NLL: packed(losses.numpy())}
    if teacher is not None:
        original = _rows(teacher, window)
        if original.shape != student.shape:
            raise TargetError(
                f"its logits have {student.shape[1]} columns, the original's have {original.shape[1]}; "
                "KL needs the same vocabulary"
            )
        rows = compare(
            TeacherRows.of(torch.from_numpy(original), targets), torch.from_numpy(student)
        )
        kl = rows[:, KL_TEACHER_STUDENT].astype(np.float32)
        sums |= named_sums(rows, student.shape[1]) | {KL: float(kl.sum(dtype=np.float64))}
        arrays[KL] = kl.tobytes()
    return Reading(index, len(student), window.targets, sums, arrays)


def _rows(logits: Logits, window: Window) -> Logits:
    """The logits that predict the scored tokens or classes."""
    logits = logits[window.rows]
    # The kernels are compiled for finite numbers.
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise TargetError("its logits are not finite; its weights or scales are damaged")
    return np.ascontiguousarray(logits)


def score_text(
    session: Session, text: EvaluationText, teacher: Session | None = None
) -> list[Reading]:
    """Scores all windows, without a journal."""
    windows = (
        (w, session.logits(w.ids), None if teacher is None else teacher.logits(w.ids))
        for w in text.items
    )
    return [
        score_logits(logits, window, original) for window, logits, original in windows
    ]


def position_values(
    readings: Sequence[Reading], *, divergence: bool
) -> dict[str, Estimate]:
    """Cross-entropy and KL from the original in each bin of positions, and their slopes."""
    arrays = {"cross_entropy": NLL} | ({"kl": KL} if divergence else {})
    values: dict[str, Estimate] = {}
    for name, array in arrays.items():
        values |= by_position([r.by_token(array) for r in readings]).values(name)
    return values


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
_NAMES = {NLL: "cross_entropy", KL: "kl_mean"}

AGREES = "agrees"
AS_DEPLOYED = "agrees as deployed"
DISAGREES = "DISAGREES"
IN_FLOAT32 = "agrees in float32"
_REMARKS = {
    AS_DEPLOYED: "As deployed: the file has the weights that were measured. The runtime also rounds activations; "
    "PyTorch agrees when it rounds them too.",
    IN_FLOAT32: "In float32: the file has the weights that were measured. The runtime's default arithmetic is coarser; "
    "in float32 it agrees with PyTorch.",
}


@dataclass(frozen=True)
class Agreement(Record):
    """The comparison of an artifact with its PyTorch counterpart."""

    subject: Subject
    counterpart: Subject  # the same weights in PyTorch
    compared_with: Subject  # what decided: the counterpart, the same as deployed, or the file in float32
    what: str  # the text
    verdict: str
    differences: dict[str, Estimate]  # artifact minus counterpart: cross_entropy, kl_mean

    @property
    def holds(self) -> bool:
        return self.verdict != DISAGREES

    @property
    def answer(self) -> str:
        """`yes, as deployed`: to the question whether the file agrees with PyTorch."""
        if self.verdict == AGREES:
            return "yes"
        return self.verdict.replace("agrees", "yes,") if self.holds else "NO"

    @property
    def remark(self) -> str:
        """What a verdict with a condition means; else empty."""
        return _REMARKS.get(self.verdict, "")


def differences(
    artifact: Sequence[Reading], counterpart: Sequence[Reading]
) -> dict[str, tuple[Estimate, float]]:
    """Each difference, paired by token, and its limit."""
    readings = (*artifact, *counterpart)
    limits = {NLL: (CROSS_ENTROPY_FLOOR, SCATTER * CROSS_ENTROPY_FLOOR)}
    if all(KL in reading.arrays for reading in readings):
        kl = float(np.concatenate([reading.by_token() for reading in counterpart]).mean())
        floor = KL_FLOOR + KL_SHARE * kl
        # Where rounding itself costs much, two roundings of one model scatter by about as much.
        limits[NLL] = (CROSS_ENTROPY_FLOOR, max(SCATTER * CROSS_ENTROPY_FLOOR, kl))
        limits[KL] = (floor, SCATTER * floor)
    changes = {}
    for array, (floor, most) in limits.items():
        change, stretches = paired_by_token(artifact, counterpart, array, STRETCH)
        limit = most  # too little to tell scatter from a difference
        if stretches > 1:
            scatter = float(stdtrit(stretches - 1, _FIVE_SIGMA)) * change.standard_error
            limit = min(max(floor, scatter), most)
        changes[_NAMES[array]] = (change, limit)
    return changes


def within(changes: Mapping[str, tuple[Estimate, float]]) -> bool:
    return all(abs(change.value) <= limit for change, limit in changes.values())
