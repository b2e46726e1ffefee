"""Exact budgets: the best plan under limits on bytes, predicted KL and predicted speed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kl_lens.base.errors import BudgetError, PlanError
from kl_lens.base.units import human_bytes, human_kl, human_speed, spell_bytes
from kl_lens.planning import knapsack
from kl_lens.planning.predict import Predictor, finished_plan, prediction_metric
from kl_lens.planning.problem import Problem, Totals, build_problem
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.weights.recipes import Recipe

if TYPE_CHECKING:
    from kl_lens.planning.speed import SpeedModel
    from kl_lens.targets import Target

QUANTITIES = ("bytes", "kl", "seconds")  # fields of `Choice` and `Totals`
_HUMAN = {"bytes": human_bytes, "kl": human_kl, "seconds": human_speed}
_OPTION = {"bytes": "--max-bytes", "kl": "--max-kl", "seconds": "--min-speed"}
_BEST = {"bytes": "smallest bytes", "kl": "smallest kl", "seconds": "highest speed"}


@dataclass(frozen=True)
class BudgetSolution:
    """A plan, and the proof of its optimality."""

    plan: Plan
    totals: Totals  # bytes are those of the file if `fixed_bytes` was given
    minimised: str  # of QUANTITIES
    gap: float  # relative; 0.0: proven optimal (to 1e-9, HiGHS's arithmetic)
    variables: int
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class AchievableRange:
    """Smallest and largest possible value of each quantity over all plans."""

    bytes: tuple[int, int]
    kl: tuple[float, float]
    seconds: tuple[float, float]


def plan_for_budget(
    table: SensitivityTable,
    *,
    max_bytes: float | None = None,
    max_bpw: float | None = None,
    max_kl: float | None = None,
    min_speed: float | None = None,
    speed: SpeedModel | None = None,
    minimise: str | None = None,
    recipes: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    no_head: bool = False,
    keep_fused: bool = True,
    metric: str | None = None,
    target: Target | None = None,
    fixed_bytes: int = 0,
    name: str | None = None,
) -> BudgetSolution:
    """The best plan within the limits, proven by a mixed-integer solver.

    By default it minimises bytes if KL is limited and bytes are not, otherwise predicted KL. `min_speed` is in tokens
    per second, as `speed` predicts them. For the other arguments see `build_problem`. With `fixed_bytes`, `max_bytes`
    is the size of the file; `max_bpw` always counts weights. Raises BudgetError with the possible range if no plan
    meets the limits.
    """
    if min_speed is not None and speed is None:
        raise PlanError("a limit on speed needs the speeds of the target's files: `speed_model`")
    usual, why_unusual = prediction_metric(table)
    problem = build_problem(
        table,
        recipes=recipes,
        exclude=exclude,
        no_head=no_head,
        keep_fused=keep_fused,
        speed=speed,
        metric=metric or usual,
        target=target,
        fixed_bytes=fixed_bytes,
    )
    limits, flags = _limits(problem, max_bytes, max_bpw, max_kl, min_speed)
    goal = minimise or ("bytes" if "kl" in limits and "bytes" not in limits else "kl")
    if goal not in QUANTITIES or (goal == "seconds" and speed is None):
        raise PlanError(f"cannot minimise {goal!r}; choose bytes or kl, or seconds with speeds of the target")
    selection, optimum = solve(problem, goal, limits, flags)
    totals = problem.totals(selection)
    notes: dict[str, object] = {
        "minimised": goal,
        "metric": metric or usual,
        "mip_gap": optimum.gap,
        "formats": list(recipes) if recipes is not None else "all measured",
        "fused_siblings_together": keep_fused,
    }
    if why_unusual and metric is None:
        notes["why_this_metric"] = why_unusual
    if speed is not None:
        notes["predicted_seconds_per_token"] = totals.seconds
    plan = finished_plan(
        table,
        name or _name(goal, limits, target),
        problem.assignment(selection),
        "exact budget",
        notes,
        Predictor(table, metric or usual),
        family="exact",
    )
    assert plan.bytes is not None
    besides = totals.bytes - plan.bytes
    grids = (Recipe.parse(plan.assignment[c.name]).grid for c in table.candidates)
    grown = sum(target.overhead(grid) for grid in grids) if target else 0
    assert besides == fixed_bytes + grown, "the plan's bytes must be those that the solver added up"
    plan = replace(plan, limits=limits, fixed_bytes=besides)
    return BudgetSolution(plan, totals, goal, optimum.gap, optimum.variables, optimum.seconds)


def achievable_range(problem: Problem) -> AchievableRange:
    def ends(values: list[tuple[float, float]], fixed: float = 0.0) -> tuple[float, float]:
        return fixed + math.fsum(v[0] for v in values), fixed + math.fsum(v[1] for v in values)

    groups = [g.choices for g in problem.groups]
    sizes = ends([(min(c.bytes for c in g), max(c.bytes for c in g)) for g in groups], problem.fixed_bytes)
    return AchievableRange(
        bytes=(int(sizes[0]), int(sizes[1])),
        kl=ends([(min(c.kl for c in g), max(c.kl for c in g)) for g in groups]),
        seconds=ends(
            [(min(c.seconds for c in g), max(c.seconds for c in g)) for g in groups], problem.fixed_seconds
        ),
    )


def solve(
    problem: Problem, goal: str, limits: dict[str, float], flags: Mapping[str, str] | None = None
) -> tuple[list[int], knapsack.Optimum]:
    """The selection that minimises `goal` within limits on the other quantities (totals, including fixed parts).

    `flags`: quantity → its limit as the user gave it, for messages.
    """
    flags = flags or {quantity: _flag(quantity, most) for quantity, most in limits.items()}
    _require_each_possible(problem, limits, flags)
    amounts = _amounts(problem)
    fixed = {"bytes": problem.fixed_bytes, "kl": 0.0, "seconds": problem.fixed_seconds}
    rows = [knapsack.Limit(amounts[q], most - fixed[q]) for q, most in limits.items() if q != goal]
    optimum = knapsack.minimise(amounts[goal], rows)
    # A limit on the goal itself needs no row: compare the minimum with it.
    if optimum is None or (
        goal in limits and getattr(problem.totals(optimum.selection), goal) > limits[goal]
    ):
        raise BudgetError(_contradiction(problem, limits, flags))
    return optimum.selection, optimum


def _amounts(problem: Problem) -> dict[str, list[knapsack.Numbers]]:
    groups = [g.choices for g in problem.groups]
    return {
        "bytes": [np.array([c.bytes for c in g], dtype=np.int64) for g in groups],
        "kl": [np.array([c.kl for c in g], dtype=np.float64) for g in groups],
        "seconds": [np.array([c.seconds for c in g], dtype=np.float64) for g in groups],
    }


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
        size = max_bpw * problem.parameters / 8 + problem.besides_bytes
        if "bytes" not in limits or not size >= limits["bytes"]:
            limits["bytes"], flags["bytes"] = size, f"--max-bpw {max_bpw:g}"
    if max_kl is not None:
        limits["kl"] = max_kl
    if min_speed is not None:
        if not min_speed > 0:
            raise PlanError(
                f"--min-speed {min_speed:g} is not a limit; give a number of tokens per second above 0"
            )
        limits["seconds"] = 1 / min_speed
    if not limits:
        raise PlanError("no budget given; set at least one of --max-bytes, --max-bpw, --max-kl, --min-speed")
    for quantity, most in limits.items():
        if not math.isfinite(most):
            given = flags.get(quantity) or f"{_OPTION[quantity]} {most}"
            raise PlanError(f"{given} is not a limit; give a number")
        if quantity == "bytes":
            limits[quantity] = math.floor(most)
    return limits, {quantity: _flag(quantity, most) for quantity, most in limits.items()} | flags


def _flag(quantity: str, most: float) -> str:
    return f"{_OPTION[quantity]} {_HUMAN[quantity](most)}"


def _require_each_possible(problem: Problem, limits: dict[str, float], flags: Mapping[str, str]) -> None:
    possible = achievable_range(problem)
    for quantity, most in limits.items():
        low, high = getattr(possible, quantity)
        if most < low:
            show = _HUMAN[quantity]
            extra = ""
            if quantity == "bytes":
                bits = [8 * (end - problem.besides_bytes) / problem.parameters for end in (low, high)]
                extra = f" ({bits[0]:.3f} to {bits[1]:.3f} bits per weight)"
            raise BudgetError(
                f"{flags[quantity]} cannot be met: plans from these measurements range from "
                f"{show(low)} to {show(high)}{extra}; {'lower' if quantity == 'seconds' else 'raise'} the budget or "
                "measure smaller formats"
            )


def _contradiction(problem: Problem, limits: dict[str, float], flags: Mapping[str, str]) -> str:
    """Explains limits that are possible one by one but not together."""
    facts = []
    for quantity in limits:
        others = {q: most for q, most in limits.items() if q != quantity}
        try:
            selection, _ = solve(problem, quantity, others)
        except BudgetError:
            continue
        reached = getattr(problem.totals(selection), quantity)
        rest = " and ".join(flags[q] for q in others)
        facts.append(f"with {rest} the {_BEST[quantity]} is {_HUMAN[quantity](reached)}")
    return f"{' and '.join(flags.values())} cannot be met together: {'; '.join(facts)}; relax one of them"


def _name(goal: str, limits: dict[str, float], target: Target | None) -> str:
    """A plan with another limit, or for another target, has another name."""
    parts = [f"least_{goal}_at"]
    if "bytes" in limits:
        parts.append(spell_bytes(int(limits["bytes"])))
    if "kl" in limits:
        parts.append(f"kl{limits['kl']:g}")
    if "seconds" in limits:
        parts.append(f"{1 / limits['seconds']:g}tps".replace("+", ""))
    return "_".join(parts) + (f"-{target.name}" if target else "")
