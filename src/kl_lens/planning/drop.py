"""The smallest plan that keeps perplexity: an exact budget in KL, set by measuring.

On the original's own text cross-entropy rises by KL, so a perplexity that may grow by a share x begins as a KL limit
of log(1 + x). Prediction is additive and real text is not the original's own, so each plan is measured as a whole, and
the limit is moved until the measured perplexity just fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kl_lens.errors import BudgetError
from kl_lens.planning.budget import plan_for_budget
from kl_lens.records import Plan, SensitivityTable

Evaluate = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class DropResult:
    plan: Plan
    original: float  # perplexity
    perplexity: float  # of the plan
    evaluations: int


def plan_for_drop(
    table: SensitivityTable,
    evaluate: Evaluate,
    *,
    max_drop: float,
    evaluations: int = 6,
    name: str | None = None,
    **limits: Any,
) -> DropResult:
    """The smallest exact plan seen whose measured perplexity is at most (1 + max_drop) × the original's.

    Args:
        evaluate: perplexity under an assignment, with whatever margin for its error is wanted; the empty
            assignment is the original.
        evaluations: plans to measure at most; more of them come closer to the limit.
        limits: other limits and choices of `plan_for_budget`.
    """
    if not max_drop > 0:
        raise BudgetError("a drop of nothing leaves nothing to choose: FP16 is the plan that loses nothing")
    original = evaluate({})
    allowed = math.log1p(max_drop)
    fitting: DropResult | None = None
    good, bad = 0.0, math.inf  # KL limits that led to a plan within the drop, and beyond it
    limit, closest = allowed, math.inf
    for count in range(1, evaluations + 1):
        plan = plan_for_budget(table, max_kl=limit, name=name, **limits).plan
        perplexity = evaluate(plan.assignment)
        if not (math.isfinite(perplexity) and perplexity > 0):
            raise BudgetError(
                f"the perplexity of a plan came out as {perplexity}; measure on more held-out text, at least two "
                "windows that decide"
            )
        rise = math.log(perplexity / original)
        closest = min(closest, rise)
        if rise <= allowed:
            good = limit
            if fitting is None or (plan.bytes or 0) <= (fitting.plan.bytes or 0):
                fitting = DropResult(plan, original, perplexity, count)
            # Perplexity rises about in proportion to KL; a step too far is caught by the next measurement.
            wanted = limit * min(2.0, max(1.1, allowed / max(rise, allowed / 2)))
        else:
            bad = limit
            wanted = 0.95 * limit * allowed / rise
        limit = wanted if good < wanted < bad else (good + bad) / 2
        if math.isfinite(bad) and bad - good < 0.03 * bad:
            break
    if fitting is None:
        raise BudgetError(
            f"no plan within a perplexity rise of {max_drop:.2%} was found in {evaluations} tries; the closest rose by "
            f"{math.expm1(closest):.2%}: allow more, or measure larger formats (int8, fp16) too"
        )
    plan = replace(
        fitting.plan,
        made_by=f"{fitting.plan.made_by}, the KL limit set by measured perplexity",
        limits=fitting.plan.limits | {"drop": max_drop},
        notes=fitting.plan.notes | {"evaluations": count},
    )
    return DropResult(plan, original, fitting.perplexity, count)
