"""Made-up measurements."""

import numpy as np

from kl_lens.run.readings import KL, Reading, packed


def window_of(
    window: int,
    tokens: int,
    kl: float,
    other_kl: float,
    squared_error: float = 1.0,
    change: float = 0.0,
    same_top: float = 1.0,
    *,
    signal: float = 100.0,
) -> Reading:
    """A window with these means per token."""
    means = {
        "kl_teacher_to_student": kl,
        "kl_student_to_teacher": other_kl,
        "squared_error": squared_error,
        "signal": signal,
        "delta_cross_entropy": change,
        "same_top": same_top,
    }
    sums = {name: mean * tokens for name, mean in means.items()}
    return Reading(window, tokens, tokens, sums, {KL: packed(np.full(tokens, kl))})
