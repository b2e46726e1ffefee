"""The smallest plan within a measured loss: whole plans are measured to find the right budget in predicted KL.

The additive prediction understates what many components lose together. So each plan is measured as a whole, and the
limit on predicted KL is moved until the measured loss just fits. The loss is in nats per token: KL from the original,
or log(1 + x) for a perplexity that may grow by a share x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kl_lens.base.errors import BudgetError
from kl_lens.planning.budget import plan_for_budget
from kl_lens.run.records import Plan, SensitivityTable

# Loss of an assignment in nats per token, with any safety margin included.
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
    """The smallest plan found whose measured loss is at most `max_loss` nats per token.

    Args:
        loss: measures a whole plan, on text that no later evaluation uses.
        evaluations: most plans to measure; more come closer to the limit.
        choices: other arguments of `plan_for_budget`.
    """
    if not max_loss > 0:
        raise BudgetError("the allowed loss must be above 0; only FP16 loses nothing")
    fitting: LossResult | None = None
    good, bad = 0.0, math.inf  # KL limits that led to a loss within the limit, and above it
    limit, closest = max_loss, math.inf
    for count in range(1, evaluations + 1):
        plan = plan_for_budget(table, max_kl=limit, name=name, **choices).plan
        measured = loss(plan.assignment)
        if not math.isfinite(measured):
            raise BudgetError(
                f"the measured loss of a plan is {measured}; use more held-out text (--held-out-windows)"
            )
        closest = min(closest, measured)
        if measured <= max_loss:
            good = limit
            if fitting is None or (plan.bytes or 0) <= (fitting.plan.bytes or 0):
                fitting = LossResult(plan, measured, count)
            # Loss is roughly proportional to predicted KL; the next measurement catches a step too far.
            wanted = limit * min(2.0, max(1.1, max_loss / max(measured, max_loss / 2)))
        else:
            bad = limit
            wanted = 0.95 * limit * max_loss / measured
        limit = wanted if good < wanted < bad else (good + bad) / 2
        if math.isfinite(bad) and bad - good < 0.03 * bad:
            break
    if fitting is None:
        raise BudgetError(
            f"no plan within a loss of {max_loss:.4g} nats per token found in {evaluations} tries; the closest "
            f"lost {closest:.4g}: allow more loss, or also measure larger formats (int8, q8_0)"
        )
    plan = replace(
        fitting.plan,
        made_by=f"{fitting.plan.made_by}, the limit set by measuring whole plans",
        limits={"loss": max_loss},
        notes=fitting.plan.notes | {"evaluations": count},
    )
    return LossResult(plan, fitting.loss, count)
