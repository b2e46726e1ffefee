"""Inputs of planning besides the measurements, as stored in the run folder.

`plan`, its frontier and the report's slider all read them here, so that they solve the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kl_lens.base.errors import PlanError
from kl_lens.planning.cost import stored_recipe
from kl_lens.planning.problem import Problem, build_problem, bytes_for
from kl_lens.run.folder import Run
from kl_lens.run.records import SensitivityTable
from kl_lens.targets import Target
from kl_lens.weights.recipes import Recipe

_FIXED_BYTES = "fixed_bytes"  # kind of the run's records: target → bytes


def store_fixed_bytes(run: Run, target: Target, fixed_bytes: int) -> None:
    """Stores the bytes of the target's file besides the weights; the report cannot compute them without the model."""
    run.store(_FIXED_BYTES, target.name, fixed_bytes)


def stored_fixed_bytes(run: Run, target: Target | None) -> int:
    if target is None:
        return 0
    known = run.load(_FIXED_BYTES, target.name)
    if known is None:
        raise PlanError(
            f"the run does not say what its {target.title} file needs besides the weights; "
            f"write any plan with: kl-lens plan --target {target.name}"
        )
    return int(known)


def stock_with_our_methods(
    table: SensitivityTable,
    stock: Sequence[Mapping[str, Recipe]],
    *,
    target: Target,
    recipes: Sequence[str] | None = None,
    no_head: bool = False,
    metric: str | None = None,
) -> list[dict[str, Recipe]]:
    """The target's stock recipes with our methods: each component gets the recipe with the least damage that is no
    larger than the stock recipe's.

    Fused siblings may differ here. A stock recipe smaller than anything measured is left out.
    """
    problem = build_problem(
        table, recipes=recipes, no_head=no_head, metric=metric, target=target, keep_fused=False
    )
    by_name = {c.name: c for c in table.components}
    found = []
    for one in stock:
        sizes = {
            name: bytes_for(by_name[name], stored_recipe(by_name[name], recipe)[0], target)
            for name, recipe in one.items()
        }
        if (assignment := _least_damage(problem, sizes)) is not None:
            found.append(assignment)
    return found


def _least_damage(problem: Problem, sizes: Mapping[str, int]) -> dict[str, Recipe] | None:
    assignment = {}
    for group in problem.groups:
        (name,) = group.members
        fitting = [c for c in group.choices if name not in sizes or c.bytes <= sizes[name]]
        if not fitting:
            return None
        assignment[name] = min(fitting, key=lambda choice: (choice.kl, choice.bytes)).recipe
    return assignment
