"""A target's stock recipes with our methods: what the same sizes per component could hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kl_lens.planning.predict import stored_recipe
from kl_lens.planning.problem import Problem, bytes_for
from kl_lens.weights.recipes import Recipe


def stock_with_our_methods(
    problem: Problem, stock: Sequence[Mapping[str, Recipe]]
) -> list[dict[str, Recipe]]:
    """A target's stock recipes with our methods: each component gets the recipe with the least damage that is no
    larger than the stock recipe's.

    `problem`: without groups, because fused siblings may differ here. A stock recipe smaller than anything measured is
    left out.
    """
    by_name = {c.name: c for c in problem.table.components}
    found = []
    for one in stock:
        sizes = {
            name: bytes_for(
                by_name[name], stored_recipe(by_name[name], recipe)[0], problem.target
            )
            for name, recipe in one.items()
        }
        fitting = {
            group.members[0]: [
                c
                for c in group.choices
                if c.bytes <= sizes.get(group.members[0], math.inf)
            ]
            for group in problem.groups
        }
        if all(fitting.values()):
            found.append(
                {
                    name: min(each, key=lambda c: (c.kl, c.bytes)).recipe
                    for name, each in fitting.items()
                }
            )
    return found
