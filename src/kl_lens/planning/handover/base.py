"""What the writers for tools share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kl_lens.base.errors import PlanError
from kl_lens.model import LoadedModel
from kl_lens.run.records import Component, Plan
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import SignedScaleFormat
from kl_lens.weights.formats.zero_points import ZeroPointFormat
from kl_lens.weights.recipes import FP16, NEAREST, Recipe, parsed

Settings = dict[str, Any]


@dataclass(frozen=True)
class Handover:
    """What was written for a tool."""

    use: str  # a command or a few lines of Python; FOLDER stands for the folder of the files
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def refusal(tool: str, plan: Plan, component: str, why: str) -> PlanError:
    return PlanError(f"{tool} cannot express plan {plan.name}: {component}: {why}")


def components(model: LoadedModel, plan: Plan) -> Iterator[tuple[Component, Recipe]]:
    """Every component that can be quantized, with its recipe."""
    recipes = parsed(plan.assignment)
    for component in model.anatomy.candidates:
        yield component, recipes.get(component.name, FP16)


def layers(
    tool: str, model: LoadedModel, plan: Plan, settings: Callable[[Format], Settings | None]
) -> dict[str, Settings]:
    """Layer → the tool's settings, for tools that quantize the `Linear` layers of a PyTorch model.

    `settings`: of a format; None if the tool does not have it. Layers at FP16 are left out.
    """
    modules, chosen = dict(model.model.named_modules()), {}
    for component, recipe in components(model, plan):
        if recipe == FP16:
            continue
        layer = modules.get(component.weight.removesuffix(".weight"))
        if not isinstance(layer, nn.Linear) or component.tied_with:
            why = f"it quantizes only Linear layers of their own; this one needs fp16, not {recipe}"
            raise refusal(tool, plan, component.name, f"{why}. Edit the plan's file, or plan with --no-head")
        chosen[component.name] = grouped(tool, plan, component.name, recipe, settings)
    return chosen


def grouped(
    tool: str, plan: Plan, component: str, recipe: Recipe, settings: Callable[[Format], Settings | None]
) -> Settings:
    """The tool's settings for a recipe's format."""
    found = settings(recipe.grid)
    if found is None:
        raise refusal(tool, plan, component, f"it has nothing like {recipe.grid.name}")
    return found


def is_integer(fmt: Format) -> bool:
    """Integers of `bits` bits with a scale, and unless `symmetric` a zero point, per `group_size` weights or row."""
    return isinstance(fmt, SignedScaleFormat | ZeroPointFormat)


def own_rounding(tool: str, plan: Plan, *, ours: tuple[str, ...] = (NEAREST,)) -> tuple[str, ...]:
    """A note if the plan was measured with methods that the tool does not have."""
    others = [recipe for recipe in parsed(plan.assignment).values() if recipe.method not in ours]
    if not others:
        return ()
    names = ", ".join(sorted({recipe.method for recipe in others}))
    return (
        f"{plan.name}: {len(others)} components were measured with {names}; {tool} rounds in its own way, so measure "
        "its file",
    )


def as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
