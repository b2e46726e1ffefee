"""Decides which recipe each tensor of a file gets: the plan's, or a fallback if that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.model.anatomy import component_name
from kl_lens.model.files import and_more
from kl_lens.model.streaming import TensorSource
from kl_lens.run.records import ExportedTensor, Plan
from kl_lens.targets.gguf.architectures import TensorRule
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

FLOAT32 = "fp32"  # for everything that is not a matrix product; not a format of plans
FORMATS = (  # that plans for this target may use
    FP16, "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q4_1", "iq4_nl", "iq4_xs", "q3_k", "iq3_s", "iq3_xxs",
    "q2_k", "iq2_s", "iq2_xs", "iq2_xxs",
)  # fmt: skip
STAND_INS = (*FORMATS, "q5_0", "q5_1", FLOAT32)  # also in files: fallbacks and exact copies
_ALIASES = {"f16": FP16, "f32": FLOAT32}  # llama.cpp's own spelling


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the file: its source, shape and recipe (None: F32)."""

    rule: TensorRule
    component: str
    shape: tuple[int, ...]
    planned: Recipe | None
    recipe: Recipe | None
    reason: str | None  # why they differ

    @property
    def format(self) -> str:
        return FLOAT32 if self.recipe is None else self.recipe.grid.name

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape) if self.recipe is None else self.recipe.grid.bytes(self.shape)

    @property
    def planned_bytes(self) -> int:
        """In the planned format, or in FP16 if that does not fit the shape."""
        if self.planned is None:
            return 4 * math.prod(self.shape)
        fmt = self.planned.grid
        return 2 * math.prod(self.shape) if fmt.fits(self.shape) else fmt.bytes(self.shape)

    def record(self, digest: str, weights: str) -> ExportedTensor:
        what = self.component, self.rule.name, self.planned or FLOAT32, self.recipe or FLOAT32
        return ExportedTensor(*what, self.bytes, self.reason, digest, weights)


def choose_recipes(plan: Plan, tensors: TensorSource) -> dict[str, Recipe | None]:
    """Component → recipe (None: F32). Raises for unknown components or formats, and for tied weights in two formats."""
    shapes = tensors.shapes
    components = {component_name(name, len(shape)) for name, shape in shapes.items()}
    tied = {
        component_name(alias, len(shapes[first])): component_name(first, len(shapes[first]))
        for alias, first in tensors.aliases.items()
    }
    if unknown := sorted(set(plan.assignment) - components - set(tied)):
        raise PlanError(f"plan {plan.name}: the model has no component {unknown[0]}{and_more(unknown)}")
    chosen: dict[str, Recipe | None] = {}
    for component, planned in plan.assignment.items():
        spelling = _ALIASES.get(planned, planned)
        name = spelling.partition("+")[0]
        if name not in STAND_INS:
            raise PlanError(
                f"plan {plan.name}: GGUF has no format {name!r} ({component}); it has {', '.join(FORMATS)}. Make a "
                "plan for it with: kl-lens plan --target gguf"
            )
        wanted = None if name == FLOAT32 else Recipe.parse(spelling)
        owner = tied.get(component, component)
        if chosen.setdefault(owner, wanted) != wanted:
            raise PlanError(f"plan {plan.name}: {component} is tied to {owner}, but planned in two formats")
    return chosen


def decide(
    rule: TensorRule,
    shapes: Mapping[str, tuple[int, ...]],
    recipes: Mapping[str, Recipe | None],
    *,
    fallback: bool = True,
) -> TensorJob:
    """The recipe for a tensor; without `fallback`, FormatError if it is not the planned one."""
    if rule.parameter is None:
        assert rule.shape is not None
        shape, component = rule.shape, rule.name
    else:
        source = shapes[rule.parameter]
        shape = tuple(rule.transform(torch.empty(source, device="meta")).shape)
        component = component_name(rule.parameter, len(source))
    planned = recipes.get(component, FP16)
    recipe, reason, refused = None, None, False
    if rule.float32:
        reason = "llama.cpp computes with it in F32"
        refused = planned not in (FP16, None)
    elif planned is not None:
        recipe, reason = fitting_recipe(planned, rule.stretch(shape))
        refused = reason is not None
    if refused and not fallback:
        raise FormatError(f"{component}: {planned} is not possible: {reason}; change the plan")
    return TensorJob(rule, component, shape, planned, recipe, reason)
