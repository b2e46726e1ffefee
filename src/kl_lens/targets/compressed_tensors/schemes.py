"""Schemes: those of config.json, under the names of transformers and of vLLM, and those of llm-compressor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kl_lens.model import LoadedModel
from kl_lens.model.anatomy import FUSED_GROUPS
from kl_lens.run.records import Component
from kl_lens.targets.abilities import StockRecipe, Target
from kl_lens.targets.exporting import checkpoint_settings
from kl_lens.weights.formats import Format, get_format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.recipes import FP16, Recipe

PACKED = "pack-quantized"
# Model type → vLLM 0.32's names of modules where they are not transformers': a pattern and what takes its place.
# {layer} stands for the index of the layer after all layers: vLLM counts Falcon-H1's state-space layers behind them.
_VLLM_NAMES = {
    "falcon_h1": (
        (r"^model\.layers\.(\d+)\.mamba\.", r"model.{layer}.mixer."),
        (r"\.self_attn\.", "."),
    ),
    "granitemoehybrid": ((r"\.mamba\.", ".mixer."),),
    "lfm2": ((r"\.conv\.", ".short_conv."),),
}
# Besides those of all runtimes: what vLLM multiplies as one, in Qwen 3.5.
_FUSED = (
    *FUSED_GROUPS,
    frozenset({"in_proj_qkv", "in_proj_z"}),
    frozenset({"in_proj_b", "in_proj_a"}),
)


def fused(components: Sequence[Component]) -> Iterator[list[Component]]:
    """Siblings that vLLM multiplies as one matrix, for which it reads one scheme."""
    together: dict[tuple[str, frozenset[str]], list[Component]] = defaultdict(list)
    for component in components:
        for group in _FUSED:
            if component.kind in group:
                together[component.name.rpartition(".")[0], group].append(component)
    yield from together.values()


def is_packed(fmt: Format) -> bool:
    """Integers with a scale, and perhaps a zero point, per row or group."""
    return isinstance(fmt, SignedScaleFormat | ZeroPointFormat)


def configuration(
    model: LoadedModel, recipes: Mapping[str, Recipe], names: Mapping[str, str]
) -> dict[str, Any]:
    """The checkpoint's own settings with the schemes of its matrices; `names`: of weights in the file."""
    config = checkpoint_settings(model)
    config.pop("torch_dtype", None)
    # vLLM asks for it.
    config["architectures"] = config.get("architectures") or [type(model.model).__name__]
    config["dtype"] = "float16"  # of the scales: in bfloat16 they would be rounded again
    embedding = model.anatomy.embedding
    if embedding and embedding == model.anatomy.head:
        # Some checkpoints deny it and hold the same matrix twice.
        config["tie_word_embeddings"] = True
    groups: dict[str, list[str]] = {}
    for weight, recipe in recipes.items():
        spelled = (weight, names.get(weight, weight), _in_vllm(weight, model))
        modules = dict.fromkeys(name.removesuffix(".weight") for name in spelled)
        module, *more = modules
        if more:  # one expression for all names, so that no reader warns about others'
            module = f"re:({'|'.join(map(re.escape, modules))})$"
        groups.setdefault(recipe.grid.name, []).append(module)
    ignored = groups.pop(FP16, [])
    if groups:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": PACKED,
            "quantization_status": "compressed",  # anything else loads random weights without an error
            "config_groups": {
                f"group_{number}": {
                    "targets": names,
                    "weights": _scheme(get_format(name)),
                    "format": PACKED,
                }
                for number, (name, names) in enumerate(groups.items())
            },
            "ignore": ignored,
        }
    return config


def _scheme(fmt: Format) -> dict[str, Any]:
    scheme: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": "int",
        "symmetric": fmt.symmetric,
        "dynamic": False,
        "strategy": "group" if fmt.group_size else "channel",
    }
    return scheme | ({"group_size": fmt.group_size} if fmt.group_size else {})


def _in_vllm(name: str, model: LoadedModel) -> str:
    for pattern, replacement in _VLLM_NAMES.get(model.anatomy.model_type, ()):
        if match := re.search(pattern, name):
            index = int(match.group(1)) + model.anatomy.blocks if match.groups() else 0
            name = re.sub(pattern, replacement.format(layer=index), name)
    return name


# -- the schemes that llm-compressor's users choose: one for every Linear layer, the head left out --------------

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
