"""The part of an mlx-lm folder that one token reads, and digests of its tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from kl_lens.targets.contents import BODY, HEAD, LOOKUP, Contents, StoredWeight
from kl_lens.targets.mlx.export import PARTS
from kl_lens.targets.mlx.session import MLXSession

_EMBEDDINGS = ("embeddings", "embed_tokens")
_EXPERTS = "switch_mlp"


def file_contents(file: Path) -> Contents:
    """Roles from mlx-lm's names; states as a session keeps them."""
    config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization") or {}
    shapes = {name: (array.shape, array.nbytes, array.dtype) for name, array in _arrays(file)}
    untied = any(name.startswith("lm_head.") for name in shapes)
    chosen = config.get("num_experts_per_tok") or 0
    experts = next(
        (config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), 0
    )
    weights = []
    for name, (shape, size, dtype) in shapes.items():
        path, _, part = name.rpartition(".")
        role, share = BODY, 1.0
        if path.endswith(_EMBEDDINGS):
            role, share = (LOOKUP, 1 / shape[0]) if untied else (HEAD, 1.0)
        elif path == "lm_head":
            role = HEAD
        elif _EXPERTS in path and chosen and experts:
            share = chosen / experts
        parameters = math.prod(shape)
        if dtype == np.uint32:
            parameters = parameters * 32 // quantization.get(path, quantization)["bits"]
        elif part in PARTS[1:] and f"{path}.scales" in shapes:
            parameters = 0
        weights.append(StoredWeight(name, size, parameters, role, share))
    with MLXSession(file.parent) as session:
        session.step(0)
        fixed, growing = session.state_bytes()
    # In float32 here; the file's own types, which a GPU uses, have half of that.
    return Contents(tuple(weights), fixed // 2, growing / 2)


def _arrays(file: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for path in sorted(file.parent.glob("model*.safetensors")):
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)
