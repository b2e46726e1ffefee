"""Decides which recipe each tensor of a file gets: the plan's, or a fallback if that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.model.anatomy import component_name
from kl_lens.model.streaming import TensorSource
from kl_lens.run.records import ExportedTensor, Plan
from kl_lens.targets.gguf.architectures import TensorRule
from kl_lens.targets.gguf.menu import ALIASES, FORMATS, STAND_INS
from kl_lens.targets.gguf.writer import FLOAT32, TensorJob
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe


def choose_recipes(plan: Plan, tensors: TensorSource) -> dict[str, Recipe | None]:
    """Component → recipe (None: F32). Raises for unknown components or formats, and for tied weights in two formats."""
    shapes = tensors.shapes
    components = {component_name(name, len(shape)) for name, shape in shapes.items()}
    tied = {
        component_name(alias, len(shapes[first])): component_name(first, len(shapes[first]))
        for alias, first in tensors.aliases.items()
    }
    unknown = sorted(set(plan.assignment) - components - set(tied))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise PlanError(f"plan {plan.name}: the model has no component {', '.join(unknown[:3])}{more}")
    chosen: dict[str, Recipe | None] = {}
    for component, planned in plan.assignment.items():
        spelling = ALIASES.get(planned, planned)
        name = spelling.partition("+")[0]
        if name not in STAND_INS:
            raise PlanError(
                f"plan {plan.name}: GGUF has no format {name!r} ({component}); it has {', '.join(FORMATS)}. Make a "
                "plan for it with: kl-lens plan --target gguf"
            )
        wanted = None if name == FLOAT32 else Recipe.parse(spelling)
        owner = tied.get(component, component)
        if chosen.setdefault(owner, wanted) != wanted:
            raise PlanError(
                f"plan {plan.name}: {component} is tied to {owner}, but the plan gives them two formats"
            )
    return chosen


def decide(
    rule: TensorRule,
    shapes: Mapping[str, tuple[int, ...]],
    recipes: Mapping[str, Recipe | None],
    fallback: bool,
) -> tuple[TensorJob, ExportedTensor]:
    """The recipe for a tensor, and its record."""
    if rule.parameter is None:
        assert rule.shape is not None
        shape, component = rule.shape, rule.name
    else:
        source = shapes[rule.parameter]
        shape = tuple(rule.transform(torch.empty(source, device="meta")).shape)
        component = component_name(rule.parameter, len(source))
    planned = recipes.get(component, FP16)
    recipe: Recipe | None = None
    reason: str | None = None
    if rule.float32:
        reason = "llama.cpp computes with it in F32"
        refused = planned not in (FP16, None)
    elif planned is None:
        refused = False
    else:
        recipe, reason = fitting_recipe(planned, rule.stretch(shape))
        refused = reason is not None
    if refused and not fallback:
        raise FormatError(
            f"{component}: {planned} is not possible: {reason}; allow fallbacks or change the plan"
        )
    job = TensorJob(rule, component, shape, recipe)
    return job, ExportedTensor(component, rule.name, planned or FLOAT32, recipe or FLOAT32, job.bytes, reason)


def planned_bytes(planned: str, shape: tuple[int, ...]) -> int:
    """Bytes in the planned format, or in FP16 if that does not fit the shape."""
    if planned == FLOAT32:
        return 4 * math.prod(shape)
    fmt = Recipe.parse(planned).grid
    return 2 * math.prod(shape) if fmt.fits(shape) else fmt.bytes(shape)
