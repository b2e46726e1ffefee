"""The mixtures of NNCF, OpenVINO's own compressor."""

from __future__ import annotations

import itertools

from kl_lens.model import LoadedModel
from kl_lens.targets.abilities import StockRecipe
from kl_lens.weights.formats.integer import NNCF_SMALLEST_SCALE
from kl_lens.weights.recipes import Recipe, fitting_recipe

_GRIDS = {"INT4_SYM": "int4", "INT4_ASYM": "uint4"}


def stock_recipes(model: LoadedModel) -> tuple[StockRecipe, ...]:
    """The mixtures that NNCF's `compress_weights` makes without data. Embedding and head get 8 bits, the rest 4. Where
    columns do not divide, groups are those of its mode ADJUST. Its 8-bit backup has zero points and ours is symmetric,
    which makes no difference worth a format. With a ratio, that share of the weights gets 4 bits, chosen by NNCF's
    data-free criterion."""
    source = "NNCF's compress_weights, mode"
    every = {c.name: Recipe("int8") for c in model.anatomy.candidates}
    recipes = [StockRecipe("INT8_SYM", every, f"{source} INT8_SYM", usual=True)]
    outer = {model.anatomy.embedding, model.anatomy.head}
    order = by_sensitivity(model, [name for name in every if name not in outer])
    shares = {1.0: "", 0.8: "-80"}
    for mode, size, ratio in itertools.product(_GRIDS, (128, 64), shares):
        name = f"{mode}-g{size}{shares[ratio]}"
        origin = f"{source} {mode}, groups of {size}, ratio {ratio:g}, data-free"
        recipe = Recipe(f"{_GRIDS[mode]}-g{size}")
        small = {
            c: fitting_recipe(recipe, model.anatomy.component(c).shape)[0]
            for c in least_sensitive(model, order, ratio)
        }
        usual = name == "INT4_SYM-g128"
        recipes.append(StockRecipe(name, every | small, origin, usual))
    return tuple(recipes)


def by_sensitivity(model: LoadedModel, names: list[str]) -> list[str]:
    """From least to most sensitive by NNCF's WEIGHT_QUANTIZATION_ERROR, one over the largest mean squared error of any
    row at its asymmetric 8 bits. So weights that 8 bits round worst get 4 bits first, whatever that does to the model.
    """

    def error(name: str) -> float:
        weight = model.tensor(model.anatomy.component(name).weight).float()
        low = weight.amin(-1, keepdim=True).clamp(max=0)
        high = weight.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=NNCF_SMALLEST_SCALE)
        zero = (-(low / scale).round()).clamp(0, 255)
        stored = ((weight / scale + zero).round().clamp(0, 255) - zero) * scale
        return float((stored - weight).square().mean(-1).max())

    return sorted(names, key=error, reverse=True)


def least_sensitive(model: LoadedModel, order: list[str], ratio: float) -> list[str]:
    """The first components in order that together hold less than `ratio` of all weights."""
    if ratio == 1:
        return order
    sizes = [model.anatomy.component(name).parameters for name in order]
    together = itertools.accumulate(sizes)
    return [
        name
        for name, total in zip(order, together, strict=True)
        if total < ratio * sum(sizes)
    ]
