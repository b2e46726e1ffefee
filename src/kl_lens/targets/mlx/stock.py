"""The recipes of `mlx_lm.convert`: one number of bits for everything, or one of its mixtures.

mlx-lm leaves a matrix as it is if groups do not divide its columns. Routers of experts are no candidates here and stay
FP16; mlx-lm stores some in 8 bits.
"""

from __future__ import annotations

from kl_lens.model import LoadedModel
from kl_lens.run.records import Component
from kl_lens.targets.base import StockRecipe
from kl_lens.targets.mlx.layout import Layout
from kl_lens.weights.recipes import FP16, Recipe

_UNIFORM = ((4, 64), (4, 32), (4, 128), (3, 64), (5, 64), (6, 64), (8, 64))  # bits, group size
_USUAL = ((4, 64), (8, 64))  # mlx-lm's default, and what is called lossless
_MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
_GROUP = 64


def stock_recipes(model: LoadedModel, layout: Layout) -> tuple[StockRecipe, ...]:
    candidates = model.anatomy.candidates
    recipes = [
        StockRecipe(
            f"{bits}bit" if group == _GROUP else f"{bits}bit-g{group}",
            {c.name: _held(c, bits, group) for c in candidates},
            f"mlx_lm.convert -q --q-bits {bits} --q-group-size {group} --dtype float16",
            usual=(bits, group) in _USUAL,
        )
        for bits, group in _UNIFORM
    ]
    names = {matrix.component: matrix.name for matrix in layout.matrices}
    if not any("down_proj" in name for name in names.values()):
        return tuple(recipes)  # mlx_lm.convert refuses its mixtures for such a model
    for name, (low, high) in _MIXED.items():
        mixed = {
            c.name: _held(c, high if _raised(names[c.name], c, model.anatomy.blocks) else low, _GROUP)
            for c in candidates
        }
        recipes.append(
            StockRecipe(name, mixed, f"mlx_lm.convert -q --quant-predicate {name} --dtype float16")
        )
    return tuple(recipes)


def _held(component: Component, bits: int, group: int) -> Recipe:
    recipe = Recipe(f"affine{bits}-g{group}")
    return FP16 if recipe.grid.fits(component.shape) else recipe


def _raised(name: str, component: Component, layers: int) -> bool:
    """mlx-lm's `mixed_quant_predicate`: values, outputs of feed-forward parts and the head."""
    index = component.block or 0
    more = index < layers // 8 or index >= 7 * layers // 8 or (index - layers // 8) % 3 == 2
    return "lm_head" in name or (more and any(part in name for part in ("v_proj", "down_proj")))
