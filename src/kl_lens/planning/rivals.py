"""A target's stock recipes with our methods: what the same sizes per component could hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kl_lens.planning.predict import stored_recipe
from kl_lens.planning.problem import Problem, bytes_for
from kl_lens.run.records import Component
from kl_lens.weights.recipes import Recipe


def stock_with_our_methods(
    problem: Problem, stock: Sequence[Mapping[str, Recipe]]
) -> list[dict[str, Recipe]]:
    """A target's stock recipes with our methods: each component gets the recipe with the least damage that is no
    larger than the stock recipe's.

    `problem`: without groups, because fused siblings may differ here. A stock recipe smaller than anything measured is
    left out.
    """
    components = {c.name: c for c in problem.table.components}
    improved = (_improved(problem, components, assignment) for assignment in stock)
    return [assignment for assignment in improved if assignment is not None]


def _improved(
    problem: Problem, components: Mapping[str, Component], stock: Mapping[str, Recipe]
) -> dict[str, Recipe] | None:
    assignment = {}
    for group in problem.groups:
        (name,) = group.members
        most = math.inf
        if name in stock:
            recipe = stored_recipe(components[name], stock[name])[0]
            most = bytes_for(components[name], recipe, problem.target)
        fitting = [choice for choice in group.choices if choice.bytes <= most]
        if not fitting:
            return None
        assignment[name] = min(fitting, key=lambda c: (c.kl, c.bytes)).recipe
    return assignment
