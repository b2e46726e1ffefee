"""llama.cpp's own mixtures, as `llama-quantize` would make them for a model.

They were found for transformers: state-space matrices all get the type that the mixture is named after. What a shape
cannot hold gets the same stand-in as in llama.cpp. Its exceptions for models with exactly eight experts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.checkpoints import Anatomy
from kl_lens.formats import fitting_format
from kl_lens.records import Component
from kl_lens.targets.base import StockRecipe

# Mixture → the type of most weights.
_BASES = {"Q4_0": "q4_0", "Q4_K_M": "q4_k", "Q5_K_M": "q5_k", "Q6_K": "q6_k", "Q8_0": "q8_0"}
_OUTPUT = "q6_k"
_FUSED_ATTENTION = {"Q4_K_M": "q5_k", "Q5_K_M": "q6_k"}


def stock_recipes(anatomy: Anatomy) -> tuple[StockRecipe, ...]:
    origin = "llama.cpp's llama-quantize {}, without an importance matrix"
    return tuple(StockRecipe(name, _mixture(name, anatomy), origin.format(name)) for name in _BASES)


def _mixture(name: str, anatomy: Anatomy) -> dict[str, str]:
    candidates = anatomy.candidates
    more = _more_bits(candidates, anatomy.blocks) if name.endswith("_M") else set()
    chosen = {}
    for component in candidates:
        wanted = _BASES[name]
        if component.name == anatomy.head:  # a tied embedding is the head
            wanted = wanted if wanted == "q8_0" else _OUTPUT
        elif component.name in more:
            wanted = _OUTPUT
        elif component.kind == "qkv_proj":
            wanted = _FUSED_ATTENTION.get(name, wanted)
        chosen[component.name] = fitting_format(wanted, component.shape)[0].name
    return chosen


def _more_bits(candidates: Sequence[Component], blocks: int) -> set[str]:
    """The values of attention and the last matrices of feed-forwards that the mixtures called M raise."""
    values = [c for c in candidates if c.kind in ("v_proj", "qkv_proj")]
    downs = [c for c in candidates if c.kind == "down_proj"]
    experts = any(len(c.shape) == 3 for c in candidates)
    raised = {c.name for i, c in enumerate(values) if c.kind == "v_proj" and _is_raised(i, len(values))}
    for index, component in enumerate(downs):
        layer = component.block if experts and component.block is not None else index
        if _is_raised(layer, blocks):
            raised.add(component.name)
    return raised


def _is_raised(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third in between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
