"""The planning problem: one recipe for each group of components, with the cost of each choice."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.planning.cost import component_bytes, fp16_bytes, stored_recipe
from kl_lens.planning.predict import (
    Predictor,
    measured_recipes,
    prediction_metric,
    require_measurements,
    require_sane,
)
from kl_lens.run.records import Component, SensitivityTable
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.planning.speed import SpeedModel
    from kl_lens.targets import Target


@dataclass(frozen=True)
class Choice:
    """One recipe for all members of a group."""

    recipe: Recipe
    bytes: int
    kl: float
    seconds: float = 0.0  # per token; 0 without a model of speed


@dataclass(frozen=True)
class Group:
    """Components that must share a recipe; most groups have one member."""

    members: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Totals:
    bytes: int
    kl: float
    seconds: float


@dataclass(frozen=True)
class Problem:
    """What a plan decides (groups) and what is fixed."""

    groups: tuple[Group, ...]
    fixed_bytes: int  # weights without a choice, and the rest of the file
    fixed_seconds: float
    parameters: int
    besides_bytes: int = 0  # the part of `fixed_bytes` that is not weights
    refused: Mapping[tuple[str, Recipe], str] = field(default_factory=dict)  # (component, recipe) → why not

    def assignment(self, selection: Sequence[int]) -> dict[str, Recipe]:
        return {
            member: group.choices[index].recipe
            for group, index in zip(self.groups, selection, strict=True)
            for member in group.members
        }

    def totals(self, selection: Sequence[int]) -> Totals:
        chosen = [group.choices[index] for group, index in zip(self.groups, selection, strict=True)]
        return Totals(
            bytes=self.fixed_bytes + sum(c.bytes for c in chosen),
            kl=math.fsum(c.kl for c in chosen),
            seconds=math.fsum([self.fixed_seconds, *(c.seconds for c in chosen)]),
        )


def bytes_for(component: Component, recipe: Recipe, target: Target | None) -> int:
    """Bytes of a component, with the overhead in the target's file."""
    extra = target.overhead(recipe.grid) if target else 0
    return component_bytes(component, recipe) + extra


def _why_not(component: Component, recipe: Recipe, target: Target) -> str | None:
    """Why this component cannot have this recipe on the target, or None."""
    reason = target.holds(recipe.grid, component.shape)
    if reason is None and bytes_for(component, recipe, target) > fp16_bytes(component):
        return "the file would not become smaller"
    return reason


def build_problem(
    table: SensitivityTable,
    *,
    recipes: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    no_head: bool = False,
    keep_fused: bool = True,
    speed: SpeedModel | None = None,
    metric: str | None = None,
    target: Target | None = None,
    fixed_bytes: int = 0,
) -> Problem:
    """Builds the problem for `plan`, its frontier and the report's slider.

    A group's choices are FP16 and each of `recipes` (default: all measured ones that a runtime can store) that all its
    members were measured in. Components in `exclude`, and the head with `no_head`, stay FP16.

    Args:
        speed: the target's model of speed, for seconds per token.
        metric: the damage to sum up (default: `prediction_metric`).
        target: only recipes that it supports; sizes include its overhead per recipe.
        fixed_bytes: bytes of the target's file besides the weights (header, tokenizer, float32 vectors); sizes and
            limits in bytes are then those of the file.
    """
    metric = metric or prediction_metric(table)[0]
    require_sane(table, metric)
    menu = _menu(table, recipes)
    exclude = {*exclude, *([table.head] if no_head else [])}
    by_name = {c.name: c for c in table.components}
    if unknown := sorted(set(exclude) - set(by_name)):
        raise PlanError(f"cannot exclude {unknown[0]!r}: no such component; `kl-lens inspect` lists them all")
    free = [c for c in table.candidates if c.name not in exclude]
    fixed = [c for c in table.components if not c.quantizable or c.name in exclude]
    predictor = Predictor(table, metric)
    clusters = _clusters(free) if keep_fused else [(c,) for c in free]
    refused: dict[tuple[str, Recipe], str] = {}
    groups = tuple(
        Group(
            tuple(c.name for c in members),
            _choices(members, menu, predictor, speed, target, refused),
        )
        for members in clusters
    )
    fixed_seconds = 0.0
    if speed is not None:  # weights that are never quantized are in its constant
        excluded = (c for c in fixed if c.quantizable)
        fixed_seconds = speed.constant + sum(speed.of(c.name, FP16, fp16_bytes(c)) for c in excluded)
    return Problem(
        groups=groups,
        fixed_bytes=fixed_bytes + sum(fp16_bytes(c) for c in fixed),
        fixed_seconds=fixed_seconds,
        parameters=sum(c.parameters for c in table.components),
        besides_bytes=fixed_bytes,
        refused=refused,
    )


def _menu(table: SensitivityTable, recipes: Sequence[str] | None) -> list[Recipe]:
    if recipes is None:
        measured = measured_recipes(table)
        return [r for r in measured if r != FP16 and not r.grid.name.endswith("-absmax")]
    try:
        menu = [Recipe.parse(recipe) for recipe in recipes]
    except FormatError as error:
        raise PlanError(str(error)) from None
    for recipe in menu:
        if recipe != FP16:
            require_measurements(table, recipe)
    return menu


def _clusters(free: Sequence[Component]) -> list[tuple[Component, ...]]:
    """Groups fused siblings, in the model's order; siblings of siblings join the same group."""
    leader = {c.name: c.name for c in free}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for component in free:
        for sibling in component.fused_with:
            if sibling in leader:
                leader[find(sibling)] = find(component.name)
    clusters: dict[str, list[Component]] = {}
    for component in free:
        clusters.setdefault(find(component.name), []).append(component)
    return [tuple(members) for members in clusters.values()]


def _choices(
    members: Sequence[Component],
    menu: Sequence[Recipe],
    predictor: Predictor,
    speed: SpeedModel | None,
    target: Target | None,
    refused: dict[tuple[str, Recipe], str],
) -> tuple[Choice, ...]:
    choices: dict[Recipe, Choice] = {}
    for wanted in (FP16, *menu):
        stored = {stored_recipe(member, wanted)[0] for member in members}
        if len(stored) > 1:
            continue  # the siblings would get different replacements
        recipe = stored.pop()
        estimates = [predictor.estimate(member.name, recipe) for member in members]
        values = [e.value for e in estimates if e is not None and math.isfinite(e.value)]
        if recipe in choices or len(values) < len(members):
            continue
        if target is not None:
            reasons = {(m.name, recipe): why for m in members if (why := _why_not(m, recipe, target))}
            refused |= reasons
            if reasons:
                continue
        size = sum(bytes_for(member, recipe, target) for member in members)
        seconds = speed.of(members[0].name, recipe.grid.name, size) if speed else 0.0
        choices[recipe] = Choice(recipe, size, math.fsum(values), seconds)
    if not choices:
        told = "; ".join(why for (name, _), why in refused.items() if name == members[0].name)
        raise PlanError(f"{members[0].name}: the target supports none of its recipes: {told}; measure others")
    return tuple(choices.values())
