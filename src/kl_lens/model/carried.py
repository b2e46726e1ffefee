"""What a language model carries from token to token, from its configuration alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.base.files import reference_path


@dataclass(frozen=True)
class Carried:
    """Numbers, not bytes."""

    name: str
    blocks: int
    vocabulary: int
    width: int
    matrices: int  # weights that formats are for
    vectors: int  # other weights
    states: int  # of a sequence, whatever its length: recurrent states and the last inputs of convolutions
    heads: int  # that compute scores at once: of one block
    keys: int  # of each token
    values: int


def carried_by(config: Any, name: str = "") -> Carried:
    """Runs the model without weights on five tokens, and looks at what it would keep for the next."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        with torch.device("meta"), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            )
            output = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    except Exception as error:  # a model's own code may raise anything
        raise CheckpointError(
            f"{name}: cannot be run without its weights ({one_line(error)})"
        ) from error
    cache: Any = getattr(output, "past_key_values", None) or getattr(
        output, "cache_params", None
    )
    if not hasattr(cache, "layers"):
        raise CheckpointError(
            f"{name}: {type(model).__name__} does not show what it carries from token to token, so its memory cannot "
            "be predicted"
        )
    fixed = 0
    caches = {"keys": 0, "values": 0}
    for layer in cache.layers:
        for kind in ("recurrent_states", "conv_states"):
            fixed += sum(
                t.numel()
                for t in (getattr(layer, kind, None) or {}).values()
                if t is not None
            )
        for kind in caches:
            tensor = getattr(layer, kind, None)
            caches[kind] += 0 if tensor is None else tensor.numel() // tensor.shape[-2]
    sizes = {id(p): p for p in model.parameters()}.values()
    matrices = sum(
        p.numel() for p in sizes if p.dim() > 1 and min(p.shape[-2:]) > 8
    )  # not convolutions
    return Carried(
        name,
        len(cache.layers),
        config.vocab_size,
        config.hidden_size,
        matrices,
        sum(p.numel() for p in sizes) - matrices,
        fixed,
        getattr(config, "num_attention_heads", 0) if caches["keys"] else 0,
        caches["keys"],
        caches["values"],
    )


def carried_from(source: str, *, trust_remote_code: bool = False) -> Carried:
    """Of a folder, `reference:NAME`, or a hub id, of which only the configuration is downloaded."""
    place = (
        reference_path(source.removeprefix("reference:"))
        if source.startswith("reference:")
        else source
    )
    repository, _, revision = str(place).partition("@")
    place, options = (
        (place, {})
        if Path(place).exists()
        else (repository, {"revision": revision or None})
    )
    try:
        config = transformers.AutoConfig.from_pretrained(
            place, trust_remote_code=trust_remote_code, **options
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source}: its configuration cannot be read: {one_line(error)}"
        ) from error
    return carried_by(config, source)
