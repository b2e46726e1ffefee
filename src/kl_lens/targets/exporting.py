"""What exports share: the recipe that each component gets, the files beside the weights, and the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.chat import GENERATION_FILE
from kl_lens.weights.recipes import FP16, Recipe, parsed

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

# A planned recipe and a weight's shape → the recipe that it gets, and why that is another one (or None).
Fit = Callable[[Recipe, Sequence[int]], tuple[Recipe, str | None]]


@dataclass(frozen=True)
class Choice:
    """What a component is stored as."""

    planned: Recipe
    recipe: Recipe
    reason: str | None = None  # why they differ


def choices(model: LoadedModel, plan: Plan, fit: Fit) -> dict[str, Choice]:
    """Every component's recipe in the files, by name; what the plan does not name is FP16.

    Raises TargetError for components that must not be quantized and for tied weights in two formats; FormatError if the
    plan was made with other statistics than the model has.
    """
    planned: dict[str, Recipe] = {}
    for name, recipe in parsed(plan.assignment).items():
        component = model.anatomy.component(name)
        if planned.setdefault(component.name, recipe) != recipe:
            raise TargetError(f"{name} is the same weight as {component.name}, but planned as {recipe}")
        if not component.quantizable and recipe != FP16:
            raise TargetError(f"{name} is planned as {recipe}, but must stay as it is: {component.reason}")
    chosen = {component.name: Choice(FP16, FP16) for component in model.anatomy.components}
    for name, recipe in planned.items():
        chosen[name] = Choice(recipe, *fit(recipe, model.anatomy.component(name).shape))
    model.weights.learnt_by((choice.recipe for choice in chosen.values()), plan.statistics)
    return chosen


def write_beside(model: LoadedModel, folder: Path, *, with_tokenizer: bool = True) -> list[str]:
    """Generation settings and the tokenizer's files, with its chat template; returns notes about them."""
    if (generation := model.folder / GENERATION_FILE).is_file():
        shutil.copyfile(generation, folder / GENERATION_FILE)
    if model.tokenizer is None or not with_tokenizer:
        return []
    model.tokenizer.save_pretrained(folder)
    return [model.unread_tokens] if model.unread_tokens else []


def record(
    target: str,
    model: LoadedModel,
    plan: Plan,
    folder: Path,
    tensors: Iterable[ExportedTensor],
    **settings: Any,
) -> Artifact:
    """The record of everything in a folder; `Target.export` adds digests and the bytes that the runtime loads."""
    stored = tuple(tensors)
    methods = (Recipe.parse(tensor.realised) for tensor in stored if "+" in tensor.realised)
    if learnt := model.weights.learnt_by(methods):
        settings["statistics"] = learnt
    return Artifact(
        target=target,
        plan=plan.name,
        files=tuple(sorted(path.name for path in folder.iterdir())),
        tensors=stored,
        planned_bytes=sum(t.bytes for t in stored) if plan.bytes is None else plan.bytes,
        realised_bytes=0,
        model=model.name,
        model_fingerprint=model.fingerprint,
        settings={"family": model.anatomy.model_type, **settings},
    )
