"""Which recipes a plan chooses from, if the user names none."""

from __future__ import annotations

from kl_lens.measuring.perturbation import find_candidates
from kl_lens.model import Anatomy
from kl_lens.targets import Target, menu_of
from kl_lens.weights.recipes import Recipe


def menu_for(target: Target, anatomy: Anatomy, max_bytes: int | None) -> tuple[Recipe, ...]:
    """The target's short menu, with its formats below four bits if no file of the short menu is this small."""
    usual = menu_of(target)
    if max_bytes is None or not target.small_formats:
        return usual
    smallest = {component.name: 2 * component.parameters for component in anatomy.components}
    for candidate in find_candidates(anatomy, usual)[0]:
        name = candidate.component.name
        smallest[name] = min(smallest[name], candidate.recipe.grid.bytes(candidate.component.shape))
    return menu_of(target, small=max_bytes < sum(smallest.values()))
