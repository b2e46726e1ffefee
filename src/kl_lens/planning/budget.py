"""Exact budgets: the best plan under limits on bytes, predicted KL and predicted speed, or on a measured loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kl_lens.base.errors import BudgetError, PlanError
from kl_lens.base.units import human_bytes, human_kl, human_speed, spell_bytes
from kl_lens.planning import knapsack
from kl_lens.planning.knapsack import hull_of
from kl_lens.planning.predict import finished_plan
from kl_lens.planning.problem import QUANTITIES, Problem, Totals
from kl_lens.run.records import Plan
from kl_lens.weights.recipes import parsed

_HUMAN = {"bytes": human_bytes, "kl": human_kl, "seconds": human_speed}
_OPTION = {"bytes": "--max-bytes", "kl": "--max-loss", "seconds": "--min-speed"}


@dataclass(frozen=True)
class BudgetSolution:
    """A plan, and the proof of its optimality."""

    plan: Plan
    totals: Totals  # bytes are those of the file if the problem has `fixed_bytes`
    minimised: str  # of QUANTITIES
    gap: float  # relative; 0.0: proven optimal (to 1e-9, HiGHS's arithmetic)
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class FrontierPoint:
    file_bytes: int  # of the weights without a target
    predicted_kl: float


def frontier(problem: Problem) -> tuple[FrontierPoint, ...]:
    """Plans that no other beats in both bytes and predicted KL, smallest first: the corners of the convex hull.

    `plan_for_budget` finds the best plan of any size between two of them.
    """
    amounts = _amounts(problem)
    costs = [values.astype(float) for values in amounts["kl"]]
    hull = hull_of(costs, [values.astype(float) for values in amounts["bytes"]])
    points = zip(hull.amounts, hull.costs, strict=True)
    return tuple(
        FrontierPoint(problem.fixed.bytes + int(size), float(kl)) for size, kl in points
    )


def plan_for_budget(
    problem: Problem,
    *,
    max_bytes: float | None = None,
    max_bpw: float | None = None,
    max_kl: float | None = None,
    min_speed: float | None = None,
    minimise: str | None = None,
    name: str | None = None,
) -> BudgetSolution:
    """The best plan within the limits, proven by a mixed-integer solver.

    By default it minimises bytes if KL is limited and bytes are not, otherwise predicted KL. `min_speed` is in tokens
    per second, as the problem's model of speed predicts them. `max_bytes` counts what the problem counts, the file or
    the weights; `max_bpw` always counts weights. Raises BudgetError with the possible range if no plan meets the
    limits.
    """
    limits, flags = _limits(problem, max_bytes, max_bpw, max_kl, min_speed)
    goal = minimise or ("bytes" if "kl" in limits and "bytes" not in limits else "kl")
    if goal not in QUANTITIES:
        raise PlanError(f"cannot minimise {goal!r}; choose {', '.join(QUANTITIES)}")
    if problem.speed is None and "seconds" in (goal, *limits):
        raise PlanError(
            "a limit on speed needs the speeds of the target's files: `speed_model`"
        )
    for quantity, most in limits.items():
        if most < problem.reach(quantity)[0]:
            raise _impossible(problem, quantity, flags[quantity])
    amounts = _amounts(problem)
    rows = [
        knapsack.Limit(amounts[quantity], most - getattr(problem.fixed, quantity))
        for quantity, most in limits.items()
        if quantity != goal
    ]
    optimum = knapsack.minimise(amounts[goal], rows)
    # A limit on the goal itself needs no row: compare the minimum with it.
    if optimum is None or getattr(problem.totals(optimum.selection), goal) > limits.get(
        goal, math.inf
    ):
        raise BudgetError(
            f"{' and '.join(flags.values())} cannot be met together; relax one of them"
        )
    name = name or _name(goal, limits, problem)
    plan = replace(_optimal_plan(problem, optimum, goal, name), limits=limits)
    totals = problem.totals(optimum.selection)
    return BudgetSolution(plan, totals, goal, optimum.gap, optimum.seconds)


def _optimal_plan(
    problem: Problem, optimum: knapsack.Optimum, goal: str, name: str
) -> Plan:
    totals = problem.totals(optimum.selection)
    notes: dict[str, object] = {
        "minimised": goal,
        "metric": problem.predictor.metric,
        "mip_gap": optimum.gap,
        "formats": "all measured" if problem.formats is None else list(problem.formats),
        "fused_siblings_together": problem.keeps_fused,
    }
    if problem.speed is not None:
        notes["predicted_seconds_per_token"] = totals.seconds
    plan = finished_plan(
        problem.table,
        name,
        problem.assignment(optimum.selection),
        "exact budget",
        notes,
        problem.predictor,
        family="exact",
    )
    assert plan.bytes is not None
    caches = problem.cached(optimum.selection)
    beside = problem.held_bytes + sum(choice.bytes for choice in caches.values())
    fixed = problem.besides_bytes
    if problem.target is not None:
        recipes = parsed(plan.assignment).values()
        fixed += sum(problem.target.overhead(recipe.grid) for recipe in recipes)
    assert totals.bytes == plan.bytes + fixed + beside, (
        "the plan's bytes must be those that the solver added up"
    )
    predicted = plan.predicted_kl
    if predicted is not None:
        cached = (choice.kl for choice in caches.values())
        predicted = math.fsum((problem.interaction * predicted, *cached))
    return replace(
        plan,
        fixed_bytes=fixed,
        caches={kind: str(choice.recipe) for kind, choice in caches.items()},
        held_bytes=beside,
        predicted_kl=predicted,
        interaction=problem.interaction,
    )


def _amounts(problem: Problem) -> dict[str, list[knapsack.Numbers]]:
    """Whole numbers stay whole."""

    def of(quantity: str) -> list[knapsack.Numbers]:
        return [
            np.array([getattr(choice, quantity) for choice in group.choices])
            for group in problem.groups
        ]

    return {quantity: of(quantity) for quantity in QUANTITIES}


def _limits(
    problem: Problem,
    max_bytes: float | None,
    max_bpw: float | None,
    max_kl: float | None,
    min_speed: float | None,
) -> tuple[dict[str, float], dict[str, str]]:
    """The limit of each quantity, and how the user gave it."""
    limits: dict[str, float] = {} if max_bytes is None else {"bytes": max_bytes}
    flags: dict[str, str] = {}
    if max_bpw is not None:
        size = max_bpw * _parameters(problem) / 8 + problem.besides_bytes
        if "bytes" not in limits or not size >= limits["bytes"]:
            limits["bytes"] = size
            flags["bytes"] = f"--max-bpw {max_bpw:g}"
    if max_bytes is not None and problem.held_bytes:
        flags.setdefault("bytes", f"--memory {human_bytes(max_bytes)}")
    if max_kl is not None:
        limits["kl"] = max_kl
    if min_speed is not None:
        limits["seconds"] = 1 / min_speed if min_speed > 0 else math.inf
        if not min_speed > 0:
            flags["seconds"] = f"--min-speed {min_speed:g}"
    if not limits:
        raise PlanError(
            "no budget given; set at least one of --max-bytes, --max-bpw, --max-loss, --min-speed"
        )
    for quantity, most in limits.items():
        if not math.isfinite(most):
            flag = flags.get(quantity) or f"{_OPTION[quantity]} {most}"
            raise PlanError(f"{flag} is not a limit; give a number")
    if "bytes" in limits:
        limits["bytes"] = math.floor(limits["bytes"])
    spelled = {q: f"{_OPTION[q]} {_HUMAN[q](most)}" for q, most in limits.items()}
    return limits, spelled | flags


def _parameters(problem: Problem) -> int:
    return sum(c.parameters for c in problem.table.components)


def _impossible(problem: Problem, quantity: str, flag: str) -> BudgetError:
    """What is possible instead of a limit that no plan meets."""
    low, high = problem.reach(quantity)
    show = _HUMAN[quantity]
    extra = ""
    if quantity == "bytes" and not problem.held_bytes:
        least, most = (
            8 * (end - problem.besides_bytes) / _parameters(problem)
            for end in (low, high)
        )
        extra = f" ({least:.3f} to {most:.3f} bits per weight)"
    change = "lower" if quantity == "seconds" else "raise"
    return BudgetError(
        f"{flag} cannot be met: plans from these measurements range from {show(low)} to {show(high)}{extra}; "
        f"{change} the budget or measure smaller formats"
    )


def _name(goal: str, limits: Mapping[str, float], problem: Problem) -> str:
    """A plan with another limit, or for another target, has another name."""
    spelled: dict[str, Callable[[float], str]] = {
        "bytes": lambda most: spell_bytes(int(most)),
        "kl": lambda most: f"kl{most:g}",
        "seconds": lambda most: f"{1 / most:g}tps".replace("+", ""),
    }
    parts = [spell(limits[name]) for name, spell in spelled.items() if name in limits]
    name = "_".join([f"least_{goal}_at", *parts])
    return f"{name}-{problem.target.name}" if problem.target else name


@dataclass(frozen=True)
class LossResult:
    plan: Plan
    loss: float  # measured, of the plan
    evaluations: int


def plan_for_loss(
    problem: Problem,
    loss: Callable[[Mapping[str, str]], float],
    *,
    max_loss: float,
    evaluations: int = 6,
    name: str | None = None,
) -> LossResult:
    """The smallest plan found whose measured loss is at most `max_loss` nats per token.

    The additive prediction understates what many components lose together. So each plan is measured as a whole, and
    the limit on predicted KL is moved until the measured loss just fits, at most `evaluations` times. `loss`: of an
    assignment in nats per token, on text that no later evaluation uses, with any safety margin included: KL from the
    original, or log(1 + x) for a perplexity that may grow by a share x.
    """
    if not max_loss > 0:
        raise BudgetError("the allowed loss must be above 0; only FP16 loses nothing")
    fitting: LossResult | None = None
    good = 0.0
    bad = math.inf  # KL limits that led to a loss within the limit, and above it
    limit = max_loss
    closest = math.inf
    for count in range(1, evaluations + 1):
        plan = plan_for_budget(problem, max_kl=limit, name=name).plan
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
