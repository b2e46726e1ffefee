"""A perturbation: some components with quantized weights, some blocks with rounded states."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from kl_lens.base.errors import FormatError, RunError
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.model.patching import needs_no_weights
from kl_lens.model.states import MENUS, StateFormat, keeping
from kl_lens.run.records import KINDS, Component
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

Kept = tuple[Component, str]  # a state or cache, with the format it is kept in
Unfit = tuple[Component, Recipe, str]  # what does not fit, with the reason


@dataclass(frozen=True)
class Perturbation:
    """Component name → recipe, for one candidate of the sweep or for a whole plan."""

    recipes: Mapping[str, Recipe]
    states: tuple[Kept, ...] = ()


class Kernels(Protocol):
    """What a runtime's kernels compute with. Targets implement it."""

    @property
    def name(self) -> str:
        """Of the target."""

    def activations(
        self, model: LoadedModel, recipes: Mapping[str, Recipe]
    ) -> AbstractContextManager[None]:
        """Within, the named components' inputs are rounded as the kernels round them."""


@dataclass(frozen=True)
class Candidate:
    """One component in one recipe, or a block's state in one format: what the sweep measures."""

    component: Component
    recipe: Recipe

    @property
    def is_state(self) -> bool:
        return self.component.kind in KINDS

    @property
    def perturbation(self) -> Perturbation:
        if self.is_state:
            return Perturbation({}, ((self.component, str(self.recipe)),))
        return Perturbation({self.component.name: self.recipe})

    def __str__(self) -> str:
        return f"{self.component.name} {self.recipe}"


def key_of(candidate: Candidate) -> tuple[str, Recipe]:
    return candidate.component.name, candidate.recipe


def name_pattern(text: str | None) -> re.Pattern[str]:
    """--components as a regular expression; without one, every name."""
    try:
        return re.compile(text or "")
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise RunError(
            f"--components {text!r} is not a regular expression: {error}"
        ) from error


def find_candidates(
    anatomy: Anatomy, recipes: Sequence[Recipe], pattern: str | None = None
) -> tuple[list[Candidate], list[Unfit]]:
    """Every quantizable component × recipe in network order, and the ones that do not fit, with the reason.

    If a recipe does not fit, the format that runtimes store instead is measured, unless that is FP16. A pattern that
    matches nothing is an error.
    """
    expression = name_pattern(pattern)
    matching = [
        c
        for c in anatomy.candidates
        if any(expression.search(n) for n in (c.name, *c.tied_with))
    ]
    if not matching:
        raise RunError(
            f"--components {pattern!r} matches none of the {len(anatomy.candidates)} quantizable components; "
            "`kl-lens inspect MODEL --json` lists their names"
        )
    fitting: dict[Candidate, None] = {}
    unfit: list[Unfit] = []
    for component in matching:
        for recipe in recipes:
            stored, reason = _stored(recipe, component)
            if stored is not None:
                fitting[Candidate(component, stored)] = None
            if reason is not None:
                unfit.append((component, recipe, reason))
    if not fitting:
        component, _, reason = unfit[0]
        raise FormatError(
            f"no component can be stored in {', '.join(recipes)}: {component.name}: {reason}"
        )
    return list(fitting), unfit


def states_of(model: LoadedModel) -> tuple[Component, ...]:
    """What every block carries from token to token, as far as our kernels compute it: (heads, width, states) of a
    recurrent state; (heads, width) of keys and values, for each token. Found by watching a short forward."""
    chain = model.chain
    with keeping(chain.blocks, {index: {} for index in range(len(chain))}) as kept_shapes:
        chain.full_logits(chain.task.blank(1, 5))
    return tuple(
        Component(
            name=f"{chain.blocks_name}.{block}.{kind}",
            weight="",
            kind=kind,
            family="states",
            block=block,
            blocks=(block,),
            shape=shape,
            parameters=math.prod(shape),
            quantizable=False,
        )
        for block, kinds in kept_shapes.items()
        for kind, shape in kinds.items()
    )


def cached_states(model: LoadedModel, caches: Mapping[str, str]) -> tuple[Kept, ...]:
    """The keys and values of all blocks, in the formats of their kind."""
    components = states_of(model) if caches else ()
    return tuple(
        (component, caches[component.kind])
        for component in components
        if component.kind in caches
    )


def find_state_candidates(
    model: LoadedModel, formats: Sequence[str] | None = None, pattern: str | None = None
) -> tuple[list[Candidate], list[Unfit]]:
    """Every state and cache × format (default: `states.MENUS`), and what does not fit, with the reason. Of formats that
    are the same for a shape, the first counts."""
    if model.classifier is not None:
        raise RunError(
            f"{model.name} classifies images: it keeps nothing from token to token"
        )
    expression = name_pattern(pattern)
    components = states_of(model)
    if not components:
        why = (
            "our kernels are not used"
            if not model.chain.fast
            else "it has no Mamba scan and no attention"
        )
        raise RunError(f"{model.name}: no states or caches to measure: {why}")
    fitting: dict[tuple[Component, StateFormat, int], Candidate] = {}
    unfit: list[Unfit] = []
    matching = [c for c in components if expression.search(c.name)]
    if not matching:
        kinds = " and ".join(dict.fromkeys(component.kind for component in components))
        raise RunError(
            f"{model.name} has {kinds}, such as {components[0].name}, and nothing that matches {pattern!r}"
        )
    known = set[str]()
    errors: dict[str, FormatError] = {}
    for component in matching:
        shape = (1, *component.shape)[-2:]
        for name in formats or MENUS[component.kind]:
            try:
                storage = StateFormat.parse(name, component.kind)
            except FormatError as error:  # it may be for another kind
                errors.setdefault(name, error)
                continue
            known.add(name)
            if reason := storage.fits(shape):
                unfit.append((component, Recipe(name), reason))
            else:
                key = (component, replace(storage, scales=""), storage.group(*shape))
                fitting.setdefault(key, Candidate(component, Recipe(name)))
    for name, unknown in errors.items():
        if name not in known:
            raise unknown
    if not fitting:
        raise RunError(f"{matching[0].name}: {unfit[0][2]}")
    return list(fitting.values()), unfit


def _stored(recipe: Recipe, component: Component) -> tuple[Recipe | None, str | None]:
    """The recipe to measure (None: nothing), and the reason if it is not the given one."""
    reason = recipe.grid.fits(component.shape)
    if reason is None:
        return recipe, None
    try:
        stored = fitting_recipe(recipe, component.shape)[0]
    except FormatError:
        return None, reason
    return (
        (None, reason) if stored == FP16 else (stored, f"{reason}; measured as {stored}")
    )


Replacement = tuple[torch.nn.Parameter, Tensor]


def replacements(model: LoadedModel, perturbation: Perturbation) -> list[Replacement]:
    """The perturbation's quantized weights, each with the parameter that it replaces."""
    ready: list[Replacement] = []
    for name, recipe in perturbation.recipes.items():
        component = model.anatomy.component(name)
        quantized = model.weights.quantized(component.name, recipe)
        parameters = model.parameters_of(component)
        weight = recipe.grid.dequantize(quantized).to(parameters[0].dtype)
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
    model: LoadedModel,
    perturbation: Perturbation,
    weights: Sequence[Replacement],
    kernels: Kernels | None,
) -> Iterator[None]:
    """Within, the model has the quantized weights and rounded states and, with `kernels`, a runtime's activations."""
    formats: dict[int, dict[str, StateFormat]] = defaultdict(dict)
    for component, name in perturbation.states:
        assert component.block is not None
        kind = component.kind
        formats[component.block][kind] = StateFormat.parse(name, kind)
    rounded: AbstractContextManager[None] = nullcontext()
    if kernels:
        rounded = kernels.activations(model, perturbation.recipes)
    with swapped(weights), rounded, keeping(model.chain.blocks, formats):
        yield


@contextmanager
def applied_by_block(
    model: LoadedModel, recipes: Mapping[str, Recipe], kernels: Kernels | None
) -> Iterator[None]:
    """`applied` for a model on disk: weights are made when their block is entered, because all would not fit."""
    by_block: dict[int | None, dict[str, Recipe]] = defaultdict(dict)
    for name, recipe in recipes.items():
        for block in model.anatomy.component(name).blocks or (None,):
            by_block[block][name] = recipe

    def weights_of(block: int | None) -> list[Replacement]:
        return replacements(model, Perturbation(by_block.get(block, {})))

    def watch(index: int) -> None:
        # Closed by `stack` too: an interrupt calls no hook.
        inside = stack.enter_context(ExitStack())

        def enter(block: nn.Module, _: object) -> None:
            if not needs_no_weights(block):
                inside.enter_context(swapped(weights_of(index)))

        def leave(*_: object) -> None:
            inside.close()

        block = model.chain.blocks[index]
        stack.enter_context(block.register_forward_pre_hook(enter))
        # Before the block's own weights are released.
        hook = block.register_forward_hook(leave, prepend=True, always_call=True)
        stack.enter_context(hook)

    with ExitStack() as stack:
        for index in sorted(block for block in by_block if block is not None):
            watch(index)
        outside = weights_of(None)
        stack.enter_context(applied(model, Perturbation(recipes), outside, kernels))
        yield


def first_block(anatomy: Anatomy, perturbation: Perturbation) -> int:
    """The first block that differs from the teacher: -1 before the blocks, the number of blocks for the head."""
    # If nothing is perturbed, only the head runs.
    starts = [
        anatomy.blocks,
        *(c.block for c, _ in perturbation.states if c.block is not None),
    ]
    for name in perturbation.recipes:
        component = anatomy.component(name)
        if component.block is not None:
            starts.append(component.block)
        elif component.name == anatomy.head != anatomy.embedding:
            starts.append(anatomy.blocks)
        else:
            starts.append(-1)
    return min(starts)
