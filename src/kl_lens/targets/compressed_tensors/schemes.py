"""config.json: one group of modules per scheme, under the names of transformers and of vLLM."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kl_lens.model.anatomy import FUSED_GROUPS
from kl_lens.weights.formats import FP16, Format, get_format
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.run.records import Component
    from kl_lens.weights.recipes import Recipe

CONFIG_FILE = "config.json"
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
    file = model.folder / CONFIG_FILE
    has_file = model.layout == "transformers" and file.is_file()
    text = (
        file.read_text(encoding="utf-8")
        if has_file
        else model.config.to_json_string(use_diff=False)
    )
    config: dict[str, Any] = json.loads(text)
    config.pop("torch_dtype", None)
    config["architectures"] = config.get("architectures") or [
        type(model.model).__name__
    ]  # vLLM asks for it
    config["dtype"] = "float16"  # of the scales: in bfloat16 they would be rounded again
    embedding = model.anatomy.embedding
    if embedding and embedding == model.anatomy.head:
        config["tie_word_embeddings"] = (
            True  # some checkpoints deny it and hold the same matrix twice
        )
    groups: dict[str, list[str]] = {}
    for weight, recipe in recipes.items():
        spelled = (weight, names.get(weight, weight), _in_vllm(weight, model))
        modules = dict.fromkeys(name.removesuffix(".weight") for name in spelled)
        # One expression for all names, so that no reader warns about those of others.
        every = f"re:({'|'.join(map(re.escape, modules))})$"
        groups.setdefault(recipe.grid.name, []).append(
            every if len(modules) > 1 else next(iter(modules))
        )
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
    size = fmt.group_size
    blocks = (
        {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    )
    return {
        "num_bits": fmt.bits,
        "type": "int",
        "symmetric": fmt.symmetric,
        "dynamic": False,
        **blocks,
    }


def _in_vllm(name: str, model: LoadedModel) -> str:
    for pattern, replacement in _VLLM_NAMES.get(model.anatomy.model_type, ()):
        if match := re.search(pattern, name):
            index = int(match.group(1)) + model.anatomy.blocks if match.groups() else 0
            name = re.sub(pattern, replacement.format(layer=index), name)
    return name
