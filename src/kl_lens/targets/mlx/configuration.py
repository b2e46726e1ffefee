"""config.json as mlx-lm reads it: the checkpoint's own, with the settings that transformers 5 no longer writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import UnsupportedError, one_line

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

CONFIG_FILE = "config.json"
_ROTARY = ("rope_theta", "partial_rotary_factor")
_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers' names → Granite's own


def _interval(config: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm knows only one rhythm: attention in every n-th layer."""
    kinds = config.get("layer_types") or []
    if not kinds:
        return {}
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    rhythm = ["linear_attention" if i % every else "full_attention" for i in range(1, len(kinds) + 1)]
    if kinds != rhythm or every > len(kinds):
        raise UnsupportedError("mlx-lm expects attention in every n-th layer, and layer_types says otherwise")
    return {"full_attention_interval": every}


# Model type → settings that mlx-lm needs, computed from the others.
_MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "mamba2": lambda config: {"intermediate_size": int(config["expand"] * config["hidden_size"])},
    "falcon_h1": lambda config: {"head_dim": config["hidden_size"] // config["num_attention_heads"]},
    "granitemoehybrid": lambda config: {
        "layer_types": [_LAYERS.get(kind, kind) for kind in config["layer_types"]],
        "position_embedding_type": "nope",  # where it is null; mlx-lm would take that for rotary
    },
    "lfm2": lambda config: {"block_dim": config["hidden_size"]},
    "qwen3_next": _interval,
}
_REPLACED = ("layer_types", "tie_word_embeddings")  # the computed value wins


def configuration_of(model: LoadedModel) -> dict[str, Any]:
    """As JSON: numbers that are not finite are written as transformers writes them."""
    file, text = model.folder / CONFIG_FILE, model.config.to_json_string(use_diff=False)
    if model.layout == "transformers" and file.is_file():
        text = file.read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    rotary = config.get("rope_parameters") or {}
    more = {key: rotary[key] for key in _ROTARY if key in rotary}
    if rotary.get("rope_type", "default") != "default":
        more["rope_scaling"] = rotary
    if getattr(model.config, "tie_word_embeddings", False):
        more["tie_word_embeddings"] = True  # some checkpoints deny it and hold the same matrix twice
    more |= _MORE.get(config["model_type"], lambda _: {})(config)
    return config | {key: v for key, v in more.items() if key in _REPLACED or config.get(key) is None}


def empty_model(config: dict[str, Any]) -> Any:
    """mlx-lm's model for a configuration, with weights that are never computed."""
    from mlx_lm.utils import _decode_tagged_floats, _get_classes

    try:
        model_class, arguments = _get_classes(config)
        return model_class(arguments.from_dict(_decode_tagged_floats(config)))
    except Exception as error:  # what a model class raises over a setting can be anything
        raise UnsupportedError(
            f"mlx-lm cannot build a {config['model_type']} model: {one_line(error)}"
        ) from error
