"""What a language model carries from token to token, from its configuration alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

from kl_lens.base.errors import CheckpointError
from kl_lens.model.files import refusing
from kl_lens.model.opening import model_folder


@dataclass(frozen=True)
class Carried:
    """Numbers, not bytes."""

    name: str
    blocks: int
    vocabulary: int
    width: int
    matrices: tuple[tuple[int, ...], ...]  # shapes of the weights that formats are for
    vectors: int  # other weights
    states: int  # of a sequence, whatever its length: recurrent states and the last inputs of convolutions
    heads: int  # that compute scores at once: of one block
    keys: int  # of each token
    values: int
    model_type: str = ""


def carried_by(config: Any, name: str = "") -> Carried:
    """Runs the model without weights on five tokens, and looks at what it would keep for the next."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # A model's own code may raise anything.
    with (
        refusing(f"{name}: cannot be run without its weights"),
        torch.device("meta"),
        torch.no_grad(),
    ):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
        output = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    named = (getattr(output, name, None) for name in ("past_key_values", "cache_params"))
    cache: Any = next(filter(None, named), None)
    if not hasattr(cache, "layers"):
        raise CheckpointError(
            f"{name}: {type(model).__name__} does not show what it carries from token to token, so its memory cannot "
            "be predicted"
        )
    fixed = 0
    caches = {"keys": 0, "values": 0}
    for layer in cache.layers:
        for kind in ("recurrent_states", "conv_states"):
            tensors = (getattr(layer, kind, None) or {}).values()
            fixed += sum(tensor.numel() for tensor in tensors if tensor is not None)
        for kind in caches:
            tensor = getattr(layer, kind, None)
            caches[kind] += 0 if tensor is None else tensor.numel() // tensor.shape[-2]
    # Convolutions are no matrices.
    matrices = tuple(
        tuple(p.shape)
        for p in model.parameters()
        if p.dim() > 1 and min(p.shape[-2:]) > 8
    )
    return Carried(
        name=name,
        blocks=len(cache.layers),
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        matrices=matrices,
        vectors=sum(p.numel() for p in model.parameters()) - sum(map(prod, matrices)),
        states=fixed,
        heads=getattr(config, "num_attention_heads", 0) if caches["keys"] else 0,
        **caches,
        model_type=config.model_type,
    )


def carried_from(source: str, *, trust_remote_code: bool = False) -> Carried:
    """Of a folder, `reference:NAME`, or a hub id, of which only the configuration is downloaded."""
    options = {}
    if source.startswith("reference:") or Path(source).exists():
        path = str(model_folder(source))
    else:
        path, _, revision = source.partition("@")
        options["revision"] = revision or None
    with refusing(f"{source}: its configuration cannot be read", (OSError, ValueError)):
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **options
        )
    return carried_by(config, source)
