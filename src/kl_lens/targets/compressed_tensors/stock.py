"""The schemes that llm-compressor's users choose: one for every Linear layer, the head left out."""

from __future__ import annotations

from kl_lens.model import LoadedModel
from kl_lens.targets.abilities import StockRecipe
from kl_lens.targets.base import Target
from kl_lens.weights.recipes import FP16, Recipe

# Name → recipe, what llm-compressor calls it, and whether most people try it first. GPTQ is ours.
_SCHEMES = {
    "w4a16": (Recipe("int4-g128"), 'QuantizationModifier(scheme="W4A16")', True),
    "w4a16.gptq": (Recipe("int4-g128", "gptq"), 'GPTQModifier(scheme="W4A16")', True),
    "w4a16_asym": (
        Recipe("uint4-g128"),
        'QuantizationModifier(scheme="W4A16_ASYM")',
        False,
    ),
    "w8a16": (Recipe("int8"), 'QuantizationModifier(scheme="W8A16")', True),
}


def stock_recipes(target: Target, model: LoadedModel) -> tuple[StockRecipe, ...]:
    """llm-compressor stops at a matrix that groups do not divide; here it stays in 16 bits."""
    recipes = []
    for name, (recipe, spelled, usual) in _SCHEMES.items():
        assignment = {
            c.name: FP16
            if c.name == model.anatomy.head
            or target.keeps(c)
            or target.holds(recipe.grid, c.shape)
            else recipe
            for c in model.anatomy.candidates
        }
        if set(assignment.values()) != {FP16}:
            spelled = f'llm-compressor {spelled}, ignore=["lm_head"]'
            recipes.append(StockRecipe(name, assignment, spelled, usual))
    return tuple(recipes)
