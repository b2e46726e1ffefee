"""Objectives beside the five metrics that the kernels compute.

A new one is a file beside this that ends in `register(Objective(…))`, and an import of it in `metrics.py`. Every sweep
then stores its sums under its name, and `plan --metric NAME` minimises it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """How much a token's prediction suffers, by another measure than KL; larger is worse."""

    name: str
    # Logits of the original and of the perturbed model (rows, vocabulary), and the true next tokens (rows,; -1 where
    # there is none) → one value per row. Reported is the mean over rows.
    rows: Callable[[Tensor, Tensor, Tensor], Tensor]


OBJECTIVES: dict[str, Objective] = {}


def register(objective: Objective) -> Objective:
    OBJECTIVES[objective.name] = objective
    return objective
