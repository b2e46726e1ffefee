"""The tools by name, and what their writers share.

To add a tool, write one module with a function `write(model, plan, folder, statistics)` and one line here. A tool gets
the format of every component. How values are rounded is its own affair; only llama.cpp takes our statistics too.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from kl_lens.calibration import StoredStatistics
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import PlanError
from kl_lens.formats import Format
from kl_lens.formats.integer import SignedScaleFormat
from kl_lens.formats.zero_points import ZeroPointFormat
from kl_lens.recipes import FP16, NEAREST, Recipe, parsed
from kl_lens.records import Component, Plan
from kl_lens.writing import replacing

# Name → module, in the order in which they are listed for users.
TOOLS = {
    "llama.cpp": "kl_lens.handover.llama_cpp",
    "nncf": "kl_lens.handover.nncf",
    "auto-round": "kl_lens.handover.auto_round",
    "modelopt": "kl_lens.handover.modelopt",
    "mlx-lm": "kl_lens.handover.mlx_lm",
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Handover:
    """What was written for a tool."""

    use: str  # a command or a few lines of Python; FOLDER stands for the folder of the files
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def write_recipe(
    tool: str, model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None = None
) -> Handover:
    """Writes a plan for a tool. Raises PlanError, which names the component, if the tool has no words for it.

    `statistics`: of the run, for tools that weigh columns by importance.
    """
    write: Callable[..., Handover] = importlib.import_module(TOOLS[tool]).write
    with replacing(folder) as place:
        made = write(model, plan, place, statistics)
        names = sorted(path.name for path in place.iterdir())
    files = tuple(folder / name for name in names)
    return replace(made, use=made.use.replace("FOLDER", str(folder)), files=files)


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
