"""The exact size of an assignment on disk.

Every weight counts once (tied weights are one component). Weights that are not quantizable or not named are FP16: two
bytes each. The size of a recipe depends on its format only, not on the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.run.records import Component, Plan
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe


@dataclass(frozen=True)
class RecipeShare:
    """How many components and weights have one recipe."""

    recipe: Recipe
    components: int
    parameters: int
    share: float  # of all weights of the model
    quantizable: bool = True  # False for the row of weights that cannot be quantized


@dataclass(frozen=True)
class Cost:
    """Exact size of a model under an assignment, and the recipes really used."""

    bytes: int
    parameters: int
    stored: dict[str, Recipe]  # quantizable component → the recipe it really gets
    fallbacks: dict[str, str]  # component → why it did not get the wanted recipe
    shares: tuple[RecipeShare, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters if self.parameters else 0.0

    @property
    def shares_text(self) -> str:
        """`int8 40 (61.2 %), int4 10 (8.0 %), kept 73 (0.3 %)`: components, and share of all weights."""
        rows = [(share.recipe if share.quantizable else "kept", share) for share in self.shares]
        return ", ".join(f"{what} {row.components} ({100 * row.share:.1f} %)" for what, row in rows)


@lru_cache(maxsize=65536)
def _stored(spelling: str, shape: tuple[int, ...]) -> tuple[Recipe, str | None]:
    return fitting_recipe(Recipe.parse(spelling), shape)


@lru_cache(maxsize=65536)
def _bytes(recipe: Recipe, shape: tuple[int, ...]) -> int:
    return recipe.grid.bytes(shape)


def fp16_bytes(component: Component) -> int:
    return 2 * component.parameters


def stored_recipe(component: Component, wanted: str) -> tuple[Recipe, str | None]:
    """The recipe a component gets, and why it differs from the wanted one (or None)."""
    try:
        return _stored(wanted, component.shape)
    except FormatError as error:
        raise PlanError(f"{component.name}: {error}") from None


def component_bytes(component: Component, recipe: Recipe) -> int:
    return fp16_bytes(component) if recipe == FP16 else _bytes(recipe, component.shape)


def cost_of(components: Iterable[Component], assignment: Mapping[str, str]) -> Cost:
    """Computes the size. Recipes that do not fit are replaced; `fallbacks` says why."""
    components = tuple(components)
    if unknown := sorted(set(assignment) - {c.name for c in components}):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise PlanError(f"the model has no component {unknown[0]!r}{more}; `kl-lens inspect` lists them all")
    stored: dict[str, Recipe] = {}
    fallbacks: dict[str, str] = {}
    total = 0
    for component in components:
        wanted = assignment.get(component.name, FP16)
        if not component.quantizable:
            if wanted != FP16:
                raise PlanError(
                    f"{component.name} cannot be {wanted}: it stays FP16 ({component.reason}); "
                    "take it out of the plan"
                )
            total += fp16_bytes(component)
            continue
        recipe, reason = stored_recipe(component, wanted)
        stored[component.name] = recipe
        if reason is not None:
            fallbacks[component.name] = reason
        total += component_bytes(component, recipe)
    parameters = sum(c.parameters for c in components)
    return Cost(total, parameters, stored, fallbacks, _shares(components, stored, parameters))


def _shares(
    components: tuple[Component, ...], stored: Mapping[str, Recipe], total: int
) -> tuple[RecipeShare, ...]:
    """Most bits first; last, what cannot be quantized."""
    rows = []
    for recipe in sorted(set(stored.values()), key=lambda recipe: (-recipe.grid.bits, recipe)):
        weights = [c.parameters for c in components if stored.get(c.name) == recipe]
        rows.append(RecipeShare(recipe, len(weights), sum(weights), sum(weights) / total))
    if kept := [c.parameters for c in components if not c.quantizable]:
        rows.append(RecipeShare(FP16, len(kept), sum(kept), sum(kept) / total, quantizable=False))
    return tuple(rows)


def differences(plans: Sequence[Plan], components: Sequence[Component]) -> dict[str, tuple[Recipe, ...]]:
    """Every component on which plans differ, in the model's order, with its recipe in each."""
    if len(plans) < 2:
        raise PlanError("comparing needs at least two plans")
    stored = [cost_of(components, plan.assignment).stored for plan in plans]
    recipes = {c.name: tuple(each.get(c.name, FP16) for each in stored) for c in components}
    return {name: each for name, each in recipes.items() if len(set(each)) > 1}
