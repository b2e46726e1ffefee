"""Keeps calibration and evaluation text apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kl_lens.base.errors import TextError
from kl_lens.text.windows import Windows

# How long a shared run of tokens must be to count as overlap. Similar articles share boilerplate: with an 8k BPE the
# longest run shared by WikiText-2's own train and test is 84 tokens (a typhoon's path), by train and valid 165 (the
# rules of the Boat Race).
OVERLAP_TOKENS = 192


def refuse_overlap(calibration: Windows, evaluation: Windows, ngram: int = OVERLAP_TOKENS) -> None:
    """Raises TextError if the two share a document, or `ngram` tokens in a row (half a window if less).

    The run of tokens catches what hashes of documents miss: an article inside another file, or a copy that differs by a
    word.
    """
    known = {document.sha256: document.name for document in calibration.used_documents}
    shared = [document for document in evaluation.used_documents if document.sha256 in known]
    if shared:
        others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise TextError(
            f"calibration and evaluation share a document: {known[shared[0].sha256]} is {shared[0].name}"
            f"{others}: use separate texts"
        )
    place = shared_ngram(calibration, evaluation, ngram)
    if place:
        (window_c, at_c), (window_e, at_e), run = place
        raise TextError(
            f"calibration and evaluation share {run} tokens in a row: {_place(calibration, window_c, at_c)} "
            f"and {_place(evaluation, window_e, at_e)}: use separate texts"
        )


def shared_ngram(
    a: Windows, b: Windows, ngram: int = OVERLAP_TOKENS
) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """((window, token) in `a`, (window, token) in `b`, run length) of a shared run of tokens, or None."""
    # Windows of the same text begin at different places, so short ones may share only half.
    size = min(ngram, max(1, min(a.length, b.length) // 2))
    rows_a, rows_b = a.ids.numpy(), b.ids.numpy()
    hashes_a, hashes_b = ngram_hashes(rows_a, size), ngram_hashes(rows_b, size)
    for flat in np.flatnonzero(np.isin(hashes_b, hashes_a)):
        window_b, at_b = (int(i) for i in np.unravel_index(flat, hashes_b.shape))
        wanted = rows_b[window_b, at_b : at_b + size]
        for window_a, at_a in np.argwhere(hashes_a == hashes_b[window_b, at_b]):
            if np.array_equal(rows_a[window_a, at_a : at_a + size], wanted):  # not just equal hashes
                return (int(window_a), int(at_a)), (window_b, at_b), size
    return None


def ngram_hashes(rows: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    """Hash of each run of `size` tokens in each row: [rows, length − size + 1].

    A polynomial hash modulo 2^64, put together from runs of 1, 2, 4, … tokens: H(uv) = H(u)·B^|v| + H(v).
    That is log₂(size) passes over the array rather than `size`.
    """
    base = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes
    power = rows.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    power ^= power >> np.uint64(31)  # spread small ids over all bits
    positions = rows.shape[1] - size + 1
    result = np.zeros((rows.shape[0], positions), dtype=np.uint64)
    done, span = 0, 1
    while True:
        factor = np.uint64(pow(base, span, 1 << 64))
        if size & span:
            result = result * factor + power[:, done : done + positions]
            done += span
        if done == size:
            return result
        power = power[:, :-span] * factor + power[:, span:]
        span *= 2


def _place(windows: Windows, window: int, token: int) -> str:
    names = ", ".join(document.name for document in windows.documents[window])
    return f"window {window}, token {token} ({names})"
