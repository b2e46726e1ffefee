"""llama.cpp's stock recipes, as `llama-quantize` applies them to a model, without and with an importance matrix.

They were tuned for transformers: state-space matrices all get the type in the recipe's name. If a type does not fit a
shape, the fallback is llama.cpp's. Its exceptions for models with exactly eight experts are left out. The head has no
importance matrix, which is the default of `llama-imatrix`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.checkpoints import Anatomy
from kl_lens.recipes import Recipe, fitting_recipe, preferred
from kl_lens.records import Component
from kl_lens.targets.base import StockRecipe

# Stock recipe → the type of most weights.
_BASES = {
    "Q3_K_M": "q3_k",
    "Q4_0": "q4_0",
    "IQ4_XS": "iq4_xs",
    "Q4_K_M": "q4_k",
    "Q5_K_M": "q5_k",
    "Q6_K": "q6_k",
    "Q8_0": "q8_0",
}
_USUAL = ("Q4_K_M", "Q5_K_M", "Q8_0")
_OUTPUT = "q6_k"
_FUSED_ATTENTION = {"Q3_K_M": "q4_k", "Q4_K_M": "q5_k", "Q5_K_M": "q6_k"}
_MANY = 4  # queries per key; from here on, values are few and get more bits


def stock_recipes(anatomy: Anatomy) -> tuple[StockRecipe, ...]:
    recipes = []
    for name, base in _BASES.items():
        origin = f"llama.cpp's llama-quantize {name}, {{}} an importance matrix"
        plain = _stock_recipe(name, anatomy, ())
        recipes.append(StockRecipe(name, plain, origin.format("without"), usual=name in _USUAL))
        if preferred(base, ("imatrix",)) != base:
            weighed = _stock_recipe(name, anatomy, ("imatrix",))
            recipes.append(StockRecipe(f"{name}.imatrix", weighed, origin.format("with")))
    return tuple(recipes)


def _stock_recipe(name: str, anatomy: Anatomy, methods: tuple[str, ...]) -> dict[str, Recipe]:
    raised = _raised(name, anatomy, with_importance=bool(methods))
    chosen = {}
    for component in anatomy.candidates:
        wanted = raised.get(component.name, _BASES[name])
        if component.name == anatomy.head:  # a tied embedding is the head
            recipe = Recipe(wanted if wanted == "q8_0" else _OUTPUT)
        else:
            recipe = preferred(wanted, methods)
        chosen[component.name] = fitting_recipe(recipe, component.shape)[0]
    return chosen


def _raised(name: str, anatomy: Anatomy, with_importance: bool) -> dict[str, str]:
    """Components that get more bits than the recipe's name says: attention values and outputs, feed-forward outputs."""
    candidates, blocks = anatomy.candidates, anatomy.blocks
    values = [c for c in candidates if c.kind in ("v_proj", "qkv_proj")]
    downs = [c for c in candidates if c.kind == "down_proj"]
    experts = any(len(c.shape) == 3 for c in candidates)
    raised = {
        c.name: _FUSED_ATTENTION[name] for c in values if c.kind == "qkv_proj" and name in _FUSED_ATTENTION
    }

    def layer(index: int, component: Component) -> int:
        return component.block if experts and component.block is not None else index

    if name == "Q3_K_M":
        raised |= {c.name: "q4_k" for c in candidates if c.kind == "o_proj"}
        raised |= {c.name: "q5_k" if i < 2 else "q4_k" for i, c in enumerate(values) if c.kind == "v_proj"}
        raised |= {c.name: "q5_k" if layer(i, c) < blocks // 16 else "q4_k" for i, c in enumerate(downs)}
    elif name in ("Q4_K_M", "Q5_K_M"):
        raised |= {
            c.name: _OUTPUT for i, c in enumerate(values) if c.kind == "v_proj" and _is_raised(i, len(values))
        }
        raised |= {c.name: _OUTPUT for i, c in enumerate(downs) if _is_raised(layer(i, c), blocks)}
    elif name == "IQ4_XS":
        if _queries_per_key(candidates) >= _MANY:
            raised |= {c.name: "q5_k" for c in values if c.kind == "v_proj"}
        if not with_importance:
            raised |= {c.name: "q5_k" for i, c in enumerate(downs) if layer(i, c) < blocks // 8}
    return raised


def _queries_per_key(candidates: Sequence[Component]) -> int:
    rows = {
        kind: next((c.shape[-2] for c in candidates if c.kind == kind), 0) for kind in ("q_proj", "k_proj")
    }
    return rows["q_proj"] // rows["k_proj"] if rows["k_proj"] else 0


def _is_raised(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third in between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
