"""Seconds per byte of each format, from whole models.

llama.cpp gives no access to one operation the way a model runs it (its loader repacks weights for the processor), so
the time of a component is found the other way round: decode times of several artifacts are explained by

    seconds per token = Σ over formats (bytes in that format × seconds per byte of that format)

with nothing negative, by least squares. A component then takes its bytes times its format's seconds per byte.

What a model does besides (scans, norms, sampling) is in these seconds. It cannot be told apart and need not be: every
plan stores the same weights, so a constant is the same as a constant for every weight, and totals come out right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from kl_lens.errors import TargetError


@dataclass(frozen=True)
class Fit:
    """What explains the decode times."""

    seconds_per_byte: dict[str, float]
    largest_error: float  # relative, of any artifact's explained time


def fit_formats(read: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> Fit:
    """`read[i]` is format → bytes that artifact i reads per token, `seconds[i]` its seconds per token."""
    formats = list(dict.fromkeys(name for row in read for name in row))
    matrix = np.array([[row.get(name, 0.0) for name in formats] for row in read], np.float64)
    times = np.asarray(seconds, np.float64)
    scale = matrix.max(0)
    # Relative errors, so that a slow artifact does not outvote a fast one.
    design = matrix / scale / times[:, None]
    if np.linalg.matrix_rank(design) < len(formats):
        raise TargetError(
            f"{len(times)} artifact(s) cannot tell {len(formats)} formats apart ({', '.join(formats)}); "
            "export one uniform artifact for each, and benchmark them together"
        )
    solution, _ = nnls(design, np.ones(len(times)))
    return Fit(
        seconds_per_byte={name: float(solution[i] / scale[i]) for i, name in enumerate(formats)},
        largest_error=float(np.abs(design @ solution - 1).max()),
    )
