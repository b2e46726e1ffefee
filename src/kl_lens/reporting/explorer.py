"""What the page's slider works with: every choice, every plan and every measurement, as small as JSON can be.

The page has no frontier in it but the problem itself, 400 components × 8 recipes in about 100 kB, and solves it exactly
for any budget (assets/knapsack.js). Metrics are rounded to three digits, windows to one percent; what plans are made
of, bytes and KL, is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kl_lens.planning import SpeedModel
from kl_lens.planning.cost import component_bytes, stored_recipe
from kl_lens.reporting.answer import best_profiles, recommended_names, speed_of
from kl_lens.reporting.data import RunView
from kl_lens.reporting.figures.heatmap import places_of, rows_of
from kl_lens.reporting.markup import Html, join, json_block, tag
from kl_lens.reporting.palette import format_class
from kl_lens.reporting.plans import FAMILIES, PlanView
from kl_lens.reporting.sections.words import on_run
from kl_lens.reporting.spaces import Space
from kl_lens.run.records import ARTIFACT, Component, Estimate, Subject
from kl_lens.weights.recipes import FP16, Recipe

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MOST_WINDOWS = 24  # shown as dots; of more, evenly many
# Windows' KLs as two digits on a logarithmic scale: 62² steps over 15 decades.
_LOWEST, _DECADES = 1e-12, 15
METRICS = ("kl_student_to_teacher", "mse", "sqnr_db", "delta_cross_entropy", "same_top", "kl_p99")


def explorer(view: RunView) -> Html | None:
    """The run's data, and the place that the script fills."""
    if not view.spaces:
        return None
    place = tag("div", id="explorer", class_="explorer")
    return join([place, json_block("explorer-data", {"metrics": METRICS, "run": _run(view)})])


def _run(view: RunView) -> dict[str, Any]:
    shown = [c for c in view.components if c.quantizable]
    rows = rows_of(shown)
    return {
        "each": "image" if view.identity.get("task") == "image" else "token",
        "components": [
            [c.name, rows[c.name], [b for b in places_of(c) if b is not None], list(c.shape), c.parameters]
            for c in shown
        ],
        "seen": {str(i): view.seen[c.name] for i, c in enumerate(shown) if c.name in view.seen},
        "parameters": sum(c.parameters for c in view.components),
        "spaces": [_space(view, space, shown) for space in view.spaces.values()],
    }


def _space(view: RunView, space: Space, components: Sequence[Component]) -> dict[str, Any]:
    number = {c.name: i for i, c in enumerate(components)}
    plans = plans_of(view, space)
    recipes = _recipes(space, plans)
    problem = space.problem
    return {
        "target": space.target,
        "title": space.title,
        "fixed": problem.fixed_bytes,
        "fp16": view.fp16_of(space.target),
        "factor": space.factor,
        "command": on_run(view, "plan", *(["--target", space.target] if space.target else [])),
        "export": on_run(view, "export", "--target", space.target or "TARGET"),
        "recipes": list(recipes),
        "colours": [format_class(r) for r in recipes],
        "groups": [
            [
                [number[m] for m in group.members],
                [recipes[c.recipe] for c in group.choices],
                [c.bytes for c in group.choices],
                [c.kl for c in group.choices],
            ]
            for group in problem.groups
        ],
        "speed": space.speed and _speed(space.speed, problem.fixed_seconds, recipes, number),
        "no_speed": space.no_speed,
        "measured": _measured(space, components, recipes),
        "plans": [_plan(view, space, plan, components, recipes) for plan in plans],
    }


def _speed(
    speed: SpeedModel, constant: float, recipes: Mapping[Recipe, int], number: Mapping[str, int]
) -> dict[str, Any]:
    """Seconds per token: the constant, and bytes times the rate of their recipe, but for the looked-up component."""
    return {
        "constant": constant,
        "rates": [speed.rate(recipe.grid.name) for recipe in recipes],
        "lookup": number.get(speed.lookup or ""),
        "basis": speed.basis,
    }


def _recipes(space: Space, plans: Sequence[PlanView]) -> dict[Recipe, int]:
    """Every recipe that a choice or a plan has, fewest bits first, with its number."""
    recipes = {c.recipe for g in space.problem.groups for c in g.choices} | {FP16}
    recipes |= {recipe for plan in plans for recipe in plan.stored.values()}
    ordered = sorted(recipes, key=lambda r: (r.grid.bits, r))
    return {recipe: index for index, recipe in enumerate(ordered[: len(DIGITS)])}


def _measured(
    space: Space, components: Sequence[Component], recipes: Mapping[Recipe, int]
) -> list[list[list[Any]]]:
    """For each component: [recipe, bytes, KL, ±, windows, the other metrics] of each recipe, fewest bits first."""
    rows: dict[str, dict[int, list[Any]]] = {c.name: {} for c in components}
    by_name = {c.name: c for c in components}
    for m in space.table.measurements:
        kl = m.metrics.get("kl_teacher_to_student")
        component = by_name.get(m.component)
        if kl is None or component is None:
            continue
        stored = stored_recipe(component, m.format)[0]
        if stored not in recipes:
            continue
        windows = space.windows.get((m.component, m.format), [])
        others = [_short(m.metrics[name].value) if name in m.metrics else None for name in METRICS]
        row = [recipes[stored], component_bytes(component, stored), _short(kl.value), _short(kl.standard_error),
               coded(windows), *others]  # fmt: skip
        rows[m.component].setdefault(recipes[stored], row)
    return [[row for _, row in sorted(rows[c.name].items())] for c in components]


def coded(windows: Sequence[float]) -> str:
    """Two digits for each window."""
    step = max(1.0, len(windows) / MOST_WINDOWS)
    chosen = [windows[int(i * step)] for i in range(min(len(windows), MOST_WINDOWS))]
    most = len(DIGITS) ** 2 - 1
    places = [_LOWEST if not value > _LOWEST else min(value, _LOWEST * 10.0**_DECADES) for value in chosen]
    levels = [round(most * math.log10(value / _LOWEST) / _DECADES) for value in places]
    return "".join(DIGITS[level // len(DIGITS)] + DIGITS[level % len(DIGITS)] for level in levels)


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def plans_of(view: RunView, space: Space) -> list[PlanView]:
    """The target's own, and those without a target that were written as its files."""
    if space.target is None:
        return [p for p in view.plans if p.target is None]
    return [p for p in view.plans if p.target == space.target or f"{space.target}/{p.name}" in view.artifacts]


def _plan(
    view: RunView,
    space: Space,
    plan: PlanView,
    components: Sequence[Component],
    recipes: Mapping[Recipe, int],
) -> dict[str, Any]:
    kl, where = measured_kl(view, plan, space.target)
    timed = [p for p in best_profiles(view, plan) if p.subject.target == space.target]
    speed = speed_of(timed[0]) if timed else None
    codes = [recipes.get(plan.stored[c.name]) for c in components]
    return {
        "name": plan.name,
        "label": plan.label,
        "family": FAMILIES[plan.family],
        "ours": plan.family not in ("stock", "uniform", "paper"),
        "star": plan.name in recommended_names(view),
        "bytes": bytes_of(view, plan, space.target),
        "kl": kl and _short(kl.value),
        "error": kl and _short(kl.standard_error),
        "where": where,
        "predicted": plan.row.predicted_kl,
        "speed": (speed and speed[0] == "tokens/s" and _short(speed[1].median)) or None,
        "codes": "".join("-" if code is None else DIGITS[code] for code in codes),
    }


def bytes_of(view: RunView, plan: PlanView, target: str | None) -> int:
    """Of the target's file where it was written; else as planned."""
    written = view.subject_bytes(Subject(ARTIFACT, plan.name, target)) if target else None
    return written or plan.bytes


def measured_kl(view: RunView, plan: PlanView, target: str | None) -> tuple[Estimate | None, str]:
    """Of the target's file where it was evaluated; else of the plan in PyTorch on held-out text."""
    wanted = Subject(ARTIFACT, plan.name, target).key
    scores = [s for s in view.scores if s.kind == "divergence" and s.subject.key == wanted]
    if target and scores:
        return scores[-1].values.get("kl_mean"), f"the file, on {scores[-1].what}"
    return plan.kl, f"in PyTorch, on {plan.measured_on or 'held-out text'}"
