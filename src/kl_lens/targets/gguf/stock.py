"""llama.cpp's stock recipes, as `llama-quantize` applies them to a model, without and with an importance matrix.

They were tuned for transformers: state-space matrices all get the type that most weights have. If a type does not fit a
shape, the fallback is llama.cpp's. Its exceptions for models with exactly eight experts are left out. Embedding and
head have no importance matrix, which is the default of `llama-imatrix`. A component that is several tensors in the file
gets the type of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kl_lens.model import LoadedModel
from kl_lens.model.anatomy import component_name
from kl_lens.targets.abilities import StockRecipe
from kl_lens.targets.gguf.template import architecture_of
from kl_lens.targets.gguf.writer import ModelTensors
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import Recipe, fitting_recipe, preferred

# Stock recipe → the type of most weights.
_BASES = {
    "IQ2_XXS": "iq2_xxs",
    "IQ2_XS": "iq2_xs",
    "IQ2_S": "iq2_xs",
    "IQ2_M": "iq2_s",
    "Q2_K_S": "q2_k",
    "Q2_K": "q2_k",
    "IQ3_XXS": "iq3_xxs",
    "IQ3_XS": "iq3_s",
    "IQ3_S": "iq3_s",
    "IQ3_M": "iq3_s",
    "Q3_K_S": "q3_k",
    "Q3_K_M": "q3_k",
    "Q3_K_L": "q3_k",
    "Q4_0": "q4_0",
    "IQ4_XS": "iq4_xs",
    "Q4_K_M": "q4_k",
    "Q5_K_M": "q5_k",
    "Q6_K": "q6_k",
    "Q8_0": "q8_0",
}
_USUAL = ("Q4_K_M", "Q5_K_M", "Q8_0")
_TINY = ("IQ2_XXS", "IQ2_XS")
_TWO_BITS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
_ONLY_WITH_IMPORTANCE = (*_TWO_BITS, "Q2_K_S", "IQ3_XXS")
# Parts of tensor names → what llama.cpp takes them for; the first that is found.
_PARTS = {
    "attn_qkv.weight": "values",
    "attn_kv_b.weight": "values",
    "attn_v.weight": "values",
    "attn_k.weight": "keys",
    "attn_q.weight": "keys",
    "attn_output.weight": "attention",
    "ffn_up": "up",
    "ffn_gate": "gate",
    "ffn_down": "down",
}
_PLENTY = 4  # queries per key, or experts; from here on, values are few and get more bits


def stock_recipes(model: LoadedModel) -> tuple[StockRecipe, ...]:
    recipes = []
    file = FileTensors(model)
    for name, base in _BASES.items():
        origin = f"llama.cpp's llama-quantize {name}, {{}} an importance matrix"
        if name not in _ONLY_WITH_IMPORTANCE:
            plain = file.recipes(name, ())
            recipes.append(
                StockRecipe(name, plain, origin.format("without"), usual=name in _USUAL)
            )
        if preferred(base, ("imatrix",)) != base:
            weighed = file.recipes(name, ("imatrix",))
            recipes.append(StockRecipe(f"{name}.imatrix", weighed, origin.format("with")))
    return tuple(recipes)


@dataclass(frozen=True)
class PartTensor:
    """A tensor among those of its part, in llama.cpp's order."""

    part: str
    count: int  # tensors of the part before it
    layer: int  # its block, or `count` in a model without experts


class FileTensors:
    """The tensors that llama.cpp chooses types for."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._architecture = architecture_of(model)
        metadata = self._architecture.metadata(model.config)
        self._blocks = int(metadata["block_count"])
        self._experts = int(metadata.get("expert_count", 0))
        # Queries per key, in the first block, which is where llama.cpp looks.
        counts = (metadata.get(f"attention.head_count{end}", 0) for end in ("", "_kv"))
        heads, keys = (
            count[0] if isinstance(count, list | tuple) else count for count in counts
        )
        self._queries = int(heads) // int(keys) if keys else 0

    def recipes(self, name: str, methods: tuple[str, ...]) -> dict[str, Recipe]:
        anatomy = self._model.anatomy
        chosen = {}
        for component in anatomy.candidates:
            ends = component.name in (anatomy.head, anatomy.embedding)
            if component.name == anatomy.head:  # a tied embedding is the head
                wanted = _head(name, component.shape)
            elif ends:
                low = "q2_k" if name in _TINY else "iq3_s"
                wanted = low if name in (*_TWO_BITS, "IQ3_XXS") else _BASES[name]
            else:
                tensor = self.part_tensors.get(component.name)
                raised = tensor and self._raised(
                    name, tensor, with_importance=bool(methods)
                )
                wanted = raised or _BASES[name]
            recipe = preferred(wanted, () if ends else methods)
            chosen[component.name] = fitting_recipe(recipe, component.shape)[0]
        return chosen

    def _raised(
        self, name: str, tensor: PartTensor, *, with_importance: bool
    ) -> str | None:
        """The type of a component that does not get the recipe's own."""
        part = tensor.part
        layer = tensor.layer
        blocks = self._blocks
        first = layer < blocks // 8
        if name in _TWO_BITS:
            more = "q2_k" if name in _TINY else "iq3_s"
            if part == "values":
                return (
                    "q4_k"
                    if self._queries >= _PLENTY or self._experts >= _PLENTY
                    else more
                )
            if part == "down":
                return more if tensor.count < blocks // 8 else None
            return more if part == "attention" and name not in _TINY else None
        few = self._queries >= _PLENTY
        often = "q6_k" if _has_more(layer, blocks) else None
        values = "q6_k" if _has_more(tensor.count, self._values) else None
        raised: dict[str, dict[str, str | None]] = {
            "values": {
                "Q2_K": "q4_k" if few else "q3_k",
                "IQ3_M": "q4_k",
                "Q3_K_M": "q5_k" if tensor.count < 2 else "q4_k",
                "Q3_K_L": "q5_k",
                **dict.fromkeys(
                    ("Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S"), "q4_k" if few else None
                ),
                "IQ4_XS": "q5_k" if few else None,
                **dict.fromkeys(("Q4_K_M", "Q5_K_M"), values),
            },
            "keys": {"IQ3_XS": "iq3_xxs", "IQ3_XXS": "iq2_s"},
            "attention": {
                "Q2_K": "q3_k",
                "IQ3_XXS": "iq3_s",
                "IQ3_M": "q4_k",
                "Q3_K_M": "q4_k",
                "Q3_K_L": "q5_k",
            },
            "down": {
                "Q2_K": "q3_k",
                "Q2_K_S": "q4_k" if first else None,
                "IQ3_M": "q4_k" if first else None,
                "Q3_K_M": "q5_k" if layer < blocks // 16 else "q4_k",
                "Q3_K_L": "q5_k",
                "Q4_0": "q4_1" if first and with_importance else None,
                "IQ4_XS": "q5_k" if first and not with_importance else None,
                **dict.fromkeys(("Q4_K_M", "Q5_K_M"), often),
            },
        }
        if part in ("gate", "up"):
            return (
                "iq3_xxs"
                if name == "IQ3_XS" and blocks // 8 <= layer < 7 * blocks // 8
                else None
            )
        return raised.get(part, {}).get(name)

    @cached_property
    def part_tensors(self) -> dict[str, PartTensor]:
        model = self._model
        shapes = ModelTensors(model).shapes
        named = {
            rule.name: component_name(rule.parameter, len(shapes[rule.parameter]))
            for rule in self._architecture.tensors(model.config, shapes)
            if rule.parameter is not None and rule.name.endswith(".weight")
        }
        tensors: dict[str, PartTensor] = {}
        counts = Counter[str]()
        for tensor in sorted(named, key=lambda name: (_block(name), name)):
            part = next((part for piece, part in _PARTS.items() if piece in tensor), None)
            if part is not None:
                count = counts[part]
                layer = _block(tensor) if self._experts > 1 else count
                tensors.setdefault(named[tensor], PartTensor(part, count, layer))
                counts[part] += 1
        return tensors

    @property
    def _values(self) -> int:
        return max(
            (
                tensor.count + 1
                for tensor in self.part_tensors.values()
                if tensor.part == "values"
            ),
            default=0,
        )


def _head(name: str, shape: Sequence[int]) -> str:
    if name == "Q8_0" or get_format(_BASES[name]).fits(shape):
        return "q8_0"
    return "q5_k" if name in (*_TWO_BITS, "IQ3_XXS") else "q6_k"


def _block(tensor: str) -> int:
    block = tensor.split(".")[1]
    return int(block) if tensor.startswith("blk.") and block.isdigit() else -1


def _has_more(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third in between."""
    return (
        layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    )
