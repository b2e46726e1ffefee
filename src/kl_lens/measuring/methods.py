"""Which recipes a sweep measures: formats × methods."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.weights.formats import get_format
from kl_lens.weights.quantizers import get_quantizer
from kl_lens.weights.recipes import NEAREST, Recipe


def crossed(formats: Sequence[str], methods: Sequence[str]) -> tuple[list[Recipe], list[str]]:
    """Every format with every method that applies to it, and the reasons why others are left out.

    A recipe that names its method stays as it is, and so does a format that no method suits (fp16).
    """
    recipes: list[Recipe] = []
    reasons: list[str] = []
    for name in formats:
        if "+" in name or not methods:
            recipes.append(Recipe.parse(name))
            continue
        fmt = get_format(name)
        unsuited = {method: get_quantizer(method).suits(fmt) for method in methods}
        reasons += [f"{name}+{method}: {reason}" for method, reason in unsuited.items() if reason]
        suited = [method for method, reason in unsuited.items() if reason is None]
        recipes += [Recipe.parse(f"{name}+{method}") for method in suited or [NEAREST]]
    return list(dict.fromkeys(recipes)), reasons
