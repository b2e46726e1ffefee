"""The smallest plan that loses no more than allowed: an exact budget in KL, set by measuring whole plans.

Prediction is additive and understates what many components do together, so each plan is measured as a whole, and the
limit on predicted KL is moved until the measured loss just fits. The loss is in nats per token: KL from the original,
or log(1 + x) for a perplexity that may grow by a share x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kl_lens.errors import BudgetError
from kl_lens.planning.budget import plan_for_budget
from kl_lens.records import Plan, SensitivityTable

# Nats per token that an assignment loses, with whatever margin for its error is wanted.
Loss = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class LossResult:
    plan: Plan
    loss: float  # measured, of the plan
    evaluations: int


def plan_for_loss(
    table: SensitivityTable,
    loss: Loss,
    *,
    max_loss: float,
    evaluations: int = 6,
    name: str | None = None,
    **choices: Any,
) -> LossResult:
    """The smallest exact plan seen whose measured loss is at most `max_loss` nats per token.

    Args:
        loss: what a plan loses as a whole; on text that no later judgement uses.
        evaluations: plans to measure at most; more of them come closer to the limit.
        choices: other limits and choices of `plan_for_budget`.
    """
    if not max_loss > 0:
        raise BudgetError("a loss of nothing leaves nothing to choose: FP16 is the plan that loses nothing")
    fitting: LossResult | None = None
    good, bad = 0.0, math.inf  # KL limits that led to a plan within what is allowed, and beyond it
    limit, closest = max_loss, math.inf
    for count in range(1, evaluations + 1):
        plan = plan_for_budget(table, max_kl=limit, name=name, **choices).plan
        measured = loss(plan.assignment)
        if not math.isfinite(measured):
            raise BudgetError(
                f"the loss of a plan came out as {measured}; measure on more held-out text, at least two "
                "windows that decide"
            )
        closest = min(closest, measured)
        if measured <= max_loss:
            good = limit
            if fitting is None or (plan.bytes or 0) <= (fitting.plan.bytes or 0):
                fitting = LossResult(plan, measured, count)
            # Loss rises about in proportion to predicted KL; a step too far is caught by the next measurement.
            wanted = limit * min(2.0, max(1.1, max_loss / max(measured, max_loss / 2)))
        else:
            bad = limit
            wanted = 0.95 * limit * max_loss / measured
        limit = wanted if good < wanted < bad else (good + bad) / 2
        if math.isfinite(bad) and bad - good < 0.03 * bad:
            break
    if fitting is None:
        raise BudgetError(
            f"no plan within a loss of {max_loss:.4g} nats per token was found in {evaluations} tries; the closest "
            f"lost {closest:.4g}: allow more, or measure larger formats (int8, q8_0) too"
        )
    plan = replace(
        fitting.plan,
        made_by=f"{fitting.plan.made_by}, the limit set by measuring whole plans",
        limits={"loss": max_loss},
        notes=fitting.plan.notes | {"evaluations": count},
    )
    return LossResult(plan, fitting.loss, count)
