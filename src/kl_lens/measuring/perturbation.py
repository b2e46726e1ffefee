"""A perturbation: some components with quantized weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from kl_lens.base.errors import FormatError, RunError
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.model.patching import needs_no_weights
from kl_lens.run.records import Component
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe


@dataclass(frozen=True)
class Perturbation:
    """Component name → recipe, for one candidate of the sweep or for a whole plan."""

    recipes: Mapping[str, Recipe]

    @classmethod
    def single(cls, component: str, recipe: Recipe) -> Perturbation:
        return cls({component: recipe})


class Kernels(Protocol):
    """What a runtime's kernels compute with. Targets implement it."""

    @property
    def name(self) -> str:
        """Of the target."""

    def kernel_values(self, fmt: Format, quantized: Quantized) -> torch.Tensor:
        """The float32 weights that the kernels multiply with."""

    def activations(self, model: LoadedModel, recipes: Mapping[str, Recipe]) -> AbstractContextManager[None]:
        """Within, the named components' inputs are rounded as the kernels round them."""


@dataclass(frozen=True)
class Candidate:
    """One component in one recipe: what the sweep measures."""

    component: Component
    recipe: Recipe

    @property
    def perturbation(self) -> Perturbation:
        return Perturbation.single(self.component.name, self.recipe)

    def __str__(self) -> str:
        return f"{self.component.name} {self.recipe}"


def key_of(candidate: Candidate) -> tuple[str, Recipe]:
    return candidate.component.name, candidate.recipe


def name_pattern(text: str | None) -> re.Pattern[str]:
    """--components as a regular expression; without one, every name."""
    try:
        return re.compile(text or "")
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise RunError(f"--components {text!r} is not a regular expression: {error}") from error


def find_candidates(
    anatomy: Anatomy, recipes: Sequence[Recipe], pattern: str | None = None
) -> tuple[list[Candidate], list[tuple[Component, Recipe, str]]]:
    """Every quantizable component × recipe in network order, and the ones that do not fit, with the reason.

    If a recipe does not fit, the format that runtimes store instead is measured, unless that is FP16. A pattern that
    matches nothing is an error.
    """
    expression = name_pattern(pattern)
    matching = [c for c in anatomy.candidates if any(expression.search(n) for n in (c.name, *c.tied_with))]
    if not matching:
        raise RunError(
            f"--components {pattern!r} matches none of the {len(anatomy.candidates)} quantizable components; "
            "`kl-lens inspect --components` lists their names"
        )
    fitting: dict[Candidate, None] = {}
    unfit: list[tuple[Component, Recipe, str]] = []
    for component in matching:
        for recipe in recipes:
            stored, reason = _stored(recipe, component)
            if stored is not None:
                fitting[Candidate(component, stored)] = None
            if reason is not None:
                unfit.append((component, recipe, reason))
    if not fitting:
        component, _, reason = unfit[0]
        raise FormatError(f"no component can be stored in {', '.join(recipes)}: {component.name}: {reason}")
    return list(fitting), unfit


def _stored(recipe: Recipe, component: Component) -> tuple[Recipe | None, str | None]:
    """The recipe to measure (None: nothing), and the reason if it is not the given one."""
    reason = recipe.grid.fits(component.shape)
    if reason is None:
        return recipe, None
    try:
        stored = fitting_recipe(recipe, component.shape)[0]
    except FormatError:
        return None, reason
    return (None, reason) if stored == FP16 else (stored, f"{reason}; measured as {stored}")


Replacement = tuple[torch.nn.Parameter, torch.Tensor]


def replacements(
    model: LoadedModel, perturbation: Perturbation, kernels: Kernels | None = None
) -> list[Replacement]:
    """The perturbation's quantized weights, each with the parameter that it replaces.

    With `kernels`, the weights that a runtime multiplies with, which can differ from the stored ones.
    """
    ready: list[Replacement] = []
    for name, recipe in perturbation.recipes.items():
        component = model.anatomy.component(name)
        quantized = model.weights.quantized(component.name, recipe)
        read = recipe.grid.dequantize if kernels is None else partial(kernels.kernel_values, recipe.grid)
        parameters = model.parameters_of(component)
        weight = read(quantized).to(parameters[0].dtype)
        ready += [(parameter, weight) for parameter in parameters]
    return ready


@contextmanager
def swapped(weights: Sequence[Replacement]) -> Iterator[None]:
    """Within, the parameters hold these weights; the originals are restored even after an error."""
    originals = [parameter.data for parameter, _ in weights]
    try:
        for parameter, weight in weights:
            parameter.data = weight
        yield
    finally:
        for (parameter, _), original in zip(weights, originals, strict=True):
            parameter.data = original


@contextmanager
def applied(
    model: LoadedModel, recipes: Mapping[str, Recipe], weights: Sequence[Replacement], kernels: Kernels | None
) -> Iterator[None]:
    """Within, the model has the quantized weights and, with `kernels`, a runtime's activations."""
    with swapped(weights), kernels.activations(model, recipes) if kernels else nullcontext():
        yield


@contextmanager
def applied_by_block(
    model: LoadedModel, recipes: Mapping[str, Recipe], kernels: Kernels | None
) -> Iterator[None]:
    """`applied` for a model on disk: weights are made when their block is entered, because all would not fit."""
    blocks = list(model.chain.blocks)
    own: dict[int | None, dict[str, Recipe]] = {}
    for name, recipe in recipes.items():
        for block in model.anatomy.component(name).blocks or (None,):
            own.setdefault(block, {})[name] = recipe

    def weights_of(block: int | None) -> list[Replacement]:
        return replacements(model, Perturbation(own.get(block, {})), kernels)

    with ExitStack() as stack:
        for index in sorted(block for block in own if block is not None):
            inside = stack.enter_context(ExitStack())  # closed here too: an interrupt calls no hook

            def enter(block: nn.Module, _: object, index: int = index, inside: ExitStack = inside) -> None:
                if not needs_no_weights(block):
                    inside.enter_context(swapped(weights_of(index)))

            def leave(*_: object, inside: ExitStack = inside) -> None:
                inside.close()

            stack.callback(blocks[index].register_forward_pre_hook(enter).remove)
            # Before the block's own weights are released.
            hook = blocks[index].register_forward_hook(leave, prepend=True, always_call=True)
            stack.callback(hook.remove)
        stack.enter_context(applied(model, recipes, weights_of(None), kernels))
        yield


def first_block(anatomy: Anatomy, perturbation: Perturbation) -> int:
    """The first block that differs from the teacher: -1 before the blocks, the number of blocks for the head."""
    starts = [anatomy.blocks]  # nothing perturbed: only the head runs
    for name in perturbation.recipes:
        component = anatomy.component(name)
        if component.block is not None:
            starts.append(component.block)
        elif component.name == anatomy.head != anatomy.embedding:
            starts.append(anatomy.blocks)
        else:
            starts.append(-1)
    return min(starts)
