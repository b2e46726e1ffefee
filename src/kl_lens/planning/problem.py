"""The planning problem: one recipe for each group of components, with the cost of each choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.planning.predict import (
    Predictor,
    component_bytes,
    fp16_bytes,
    measured_recipes,
    require_measurements,
    require_sane,
    stored_recipe,
)
from kl_lens.run.readings import KL
from kl_lens.run.records import Component, SensitivityTable
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.planning.speed import SpeedModel
    from kl_lens.run.folder import Run
    from kl_lens.targets import Target

QUANTITIES = ("bytes", "kl", "seconds")  # fields of `Choice` and `Totals`
_FIXED_BYTES = "fixed_bytes"  # kind of the run's records: target → bytes


@dataclass(frozen=True)
class Totals:
    bytes: int
    kl: float
    seconds: float  # per token; 0 without a model of speed


@dataclass(frozen=True)
class Choice(Totals):
    """One recipe for all members of a group."""

    recipe: Recipe


@dataclass(frozen=True)
class Group:
    """Components that must share a recipe; most groups have one member."""

    members: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Held:
    """Bytes beside the file."""

    runtime: int  # its process, libraries and working memory
    states: int
    # Of keys and of values: the target's formats, its default first.
    caches: tuple[Group, ...]

    @property
    def fixed(self) -> int:
        return self.runtime + self.states

    def bytes(self, chosen: Mapping[str, str]) -> int:
        """With these formats of keys and values, or the defaults."""
        total = self.fixed
        for group in self.caches:
            wanted = chosen.get(group.members[0], group.choices[0].recipe)
            total += next(c.bytes for c in group.choices if c.recipe == wanted)
        return total


@dataclass(frozen=True)
class Problem:
    """What a plan decides (groups) and what is fixed."""

    table: SensitivityTable = field(compare=False)
    predictor: Predictor = field(compare=False)
    groups: tuple[Group, ...]
    fixed: Totals  # weights without a choice, and the rest of the file
    besides_bytes: int  # the part of the fixed bytes that is not weights
    target: Target | None
    speed: SpeedModel | None
    formats: Sequence[str] | None  # the user's choice
    keeps_fused: bool
    # The last of the groups: keys and values, in memory and not in the file.
    caches: tuple[Group, ...] = ()
    held_bytes: int = 0  # the part of the fixed bytes that is not in the file
    interaction: float = 1.0  # every KL here is multiplied by it

    def chosen(self, selection: Sequence[int]) -> list[tuple[Group, Choice]]:
        pairs = zip(self.groups, selection, strict=True)
        return [(group, group.choices[index]) for group, index in pairs]

    def assignment(self, selection: Sequence[int]) -> dict[str, Recipe]:
        assignment: dict[str, Recipe] = {}
        for group, choice in self.chosen(selection):
            if group not in self.caches:
                assignment |= dict.fromkeys(group.members, choice.recipe)
        return assignment

    def cached(self, selection: Sequence[int]) -> dict[str, Choice]:
        """Keys and values → what is chosen for them."""
        pairs = self.chosen(selection)[len(self.groups) - len(self.caches) :]
        return {group.members[0]: choice for group, choice in pairs}

    def totals(self, selection: Sequence[int]) -> Totals:
        chosen = [choice for _, choice in self.chosen(selection)]
        return Totals(
            bytes=self.fixed.bytes + sum(c.bytes for c in chosen),
            kl=math.fsum(c.kl for c in chosen),
            seconds=math.fsum([self.fixed.seconds, *(c.seconds for c in chosen)]),
        )

    def reach(self, quantity: str) -> tuple[float, float]:
        """The smallest and the largest possible total."""
        low = [getattr(self.fixed, quantity)]
        high = [*low]
        for group in self.groups:
            values = [getattr(choice, quantity) for choice in group.choices]
            low.append(min(values))
            high.append(max(values))
        return math.fsum(low), math.fsum(high)


def bytes_for(component: Component, recipe: Recipe, target: Target | None) -> int:
    """Bytes of a component, with the overhead in the target's file."""
    overhead = target.overhead(recipe.grid) if target else 0
    return component_bytes(component, recipe) + overhead


def build_problem(
    table: SensitivityTable,
    *,
    recipes: Sequence[str] | None = None,
    no_head: bool = False,
    keep_fused: bool = True,
    speed: SpeedModel | None = None,
    metric: str = KL,
    target: Target | None = None,
    fixed_bytes: int = 0,
    held: Held | None = None,
    interaction: float = 1.0,
) -> Problem:
    """Builds the problem for `plan`, its frontier and the report's slider.

    A group's choices are FP16 and each of `recipes` (default: all measured ones that a runtime can store) that all its
    members were measured in.

    Args:
        no_head: the head stays FP16.
        speed: the target's model of speed, for seconds per token.
        metric: the damage to sum up (default: KL).
        target: only recipes that it supports; sizes include its overhead per recipe.
        fixed_bytes: bytes of the target's file besides the weights (header, tokenizer, float32 vectors); sizes and
            limits in bytes are then those of the file.
        held: what is in memory beside the file; sizes and limits in bytes are then those of memory.
        interaction: how many times more than the sum of their parts whole plans lost; other metrics add up.
    """
    predictor = Predictor(table, metric)
    require_sane(table, predictor.metric)
    menu = _menu(table, recipes)
    head = table.head if no_head else None
    free = [c for c in table.candidates if c.name != head]
    fixed = [c for c in table.components if not c.quantizable or c.name == head]
    clusters = _clusters(free) if keep_fused else [(c,) for c in free]
    groups = []
    for members in clusters:
        choices = _choices(members, menu, predictor, speed, target)
        groups.append(Group(tuple(c.name for c in members), choices))
    caches = held.caches if held else ()
    factor = interaction if predictor.metric == KL else 1.0
    if factor != 1.0:
        groups = [_multiplied(group, factor) for group in groups]
        caches = tuple(_multiplied(group, factor) for group in caches)
    seconds = 0.0
    if speed is not None:  # weights that are never quantized are in its constant
        heads = [c for c in fixed if c.quantizable]
        seconds = sum(speed.of(c.name, FP16, fp16_bytes(c)) for c in heads)
        seconds += speed.constant
    beside = held.fixed if held else 0
    size = fixed_bytes + beside + sum(map(fp16_bytes, fixed))
    return Problem(
        table,
        predictor,
        (*groups, *caches),
        Totals(size, 0.0, seconds),
        fixed_bytes,
        target,
        speed,
        recipes,
        keep_fused,
        caches,
        beside,
        factor,
    )


def _multiplied(group: Group, factor: float) -> Group:
    choices = [replace(choice, kl=factor * choice.kl) for choice in group.choices]
    return Group(group.members, tuple(choices))


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
    cluster: dict[str, dict[str, Component]] = {c.name: {c.name: c} for c in free}
    for component in free:
        for sibling in component.fused_with:
            if sibling in cluster and cluster[sibling] is not cluster[component.name]:
                joined = cluster[component.name] | cluster[sibling]
                cluster |= dict.fromkeys(joined, joined)
    first = {id(members): members for members in (cluster[c.name] for c in free)}
    return [tuple(c for c in free if c.name in members) for members in first.values()]


def _choices(
    members: Sequence[Component],
    menu: Sequence[Recipe],
    predictor: Predictor,
    speed: SpeedModel | None,
    target: Target | None,
) -> tuple[Choice, ...]:
    choices: dict[Recipe, Choice] = {}
    refused: list[str] = []
    for proposal in (FP16, *menu):
        stored = {stored_recipe(member, proposal)[0] for member in members}
        if len(stored) > 1:
            continue  # the siblings would get different replacements
        recipe = stored.pop()
        estimates = [predictor.estimate(member.name, recipe) for member in members]
        values = [e.value for e in estimates if e is not None and math.isfinite(e.value)]
        if recipe in choices or len(values) < len(members):
            continue
        reasons = [_refusal(member, recipe, target) for member in members]
        if reason := next(filter(None, reasons), None):
            refused.append(reason)
            continue
        size = sum(bytes_for(member, recipe, target) for member in members)
        seconds = speed.of(members[0].name, recipe.grid.name, size) if speed else 0.0
        choices[recipe] = Choice(size, math.fsum(values), seconds, recipe)
    if not choices:
        raise PlanError(
            f"{members[0].name}: the target supports none of its recipes: {'; '.join(refused)}; measure others"
        )
    return tuple(choices.values())


def _refusal(component: Component, recipe: Recipe, target: Target | None) -> str | None:
    """Why this component cannot have this recipe on the target, or None."""
    if target is None:
        return None
    reason = None if recipe == FP16 else target.keeps(component)
    reason = reason or target.holds(recipe.grid, component.shape)
    if reason is None and bytes_for(component, recipe, target) > fp16_bytes(component):
        return "the file would not become smaller"
    return reason


def stock_with_our_methods(
    problem: Problem, stock: Sequence[Mapping[str, Recipe]]
) -> list[dict[str, Recipe]]:
    """A target's stock recipes with our methods: each component gets the recipe with the least damage that is no
    larger than the stock recipe's.

    `problem`: without groups, because fused siblings may differ here. A stock recipe smaller than anything measured is
    left out.
    """
    components = {c.name: c for c in problem.table.components}

    def size(name: str, recipes: Mapping[str, Recipe]) -> float:
        if name not in recipes:
            return math.inf
        recipe = stored_recipe(components[name], recipes[name])[0]
        return bytes_for(components[name], recipe, problem.target)

    improved = []
    for recipes in stock:
        assignment = {}
        for group in problem.groups:
            (name,) = group.members
            most = size(name, recipes)
            fitting = [choice for choice in group.choices if choice.bytes <= most]
            if fitting:
                assignment[name] = min(fitting, key=lambda c: (c.kl, c.bytes)).recipe
        if len(assignment) == len(problem.groups):
            improved.append(assignment)
    return improved


def store_fixed_bytes(run: Run, target: Target, fixed_bytes: int) -> None:
    """Stores the bytes of the target's file besides the weights; the report cannot compute them without the model."""
    run.store(_FIXED_BYTES, target.name, fixed_bytes)


def stored_fixed_bytes(run: Run, target: Target | None) -> int:
    if target is None:
        return 0
    size = run.load(_FIXED_BYTES, target.name)
    if size is None:
        raise PlanError(
            f"the run does not say what its {target.title} file needs besides the weights; "
            f"write any plan with: kl-lens plan --target {target.name}"
        )
    return int(size)
