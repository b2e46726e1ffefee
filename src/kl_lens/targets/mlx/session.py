"""A folder of mlx-lm running in MLX."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kl_lens.base.errors import TargetError, one_line
from kl_lens.targets.base import Contents
from kl_lens.targets.session import FedSession, Logits

# Tokens in one call of the model. The operations of a call wait in memory until it is computed; Mamba-1 has dozens for
# every token and layer.
BATCH = 128
CPU, GPU = "CPU", "GPU"
_EMBEDDINGS, _EXPERTS = ("embeddings", "embed_tokens"), "switch_mlp"


class MLXSession(FedSession):
    """One sequence at a time through mlx-lm's model.

    On a CPU it computes in float32: the CPU kernels add up in the type of the activations, and in float16 their
    rounding would hide the loss of the weights. On a GPU it computes in the file's own types, as mlx-lm does, unless
    `exact` is set. Weights are the same in both cases.
    """

    def __init__(self, folder: Path, *, device: str = CPU, exact: bool = False) -> None:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        self.place, self._device_name = folder, device
        self._device = mx.gpu if device == GPU else mx.cpu
        self.float32 = exact or device == CPU
        self._model: Any = None
        try:
            with self._here():
                self._model, self._config = load_model(folder, lazy=True)
                if self.float32:
                    self._model.update(tree_map(_widened, self._model.parameters()))
                mx.eval(self._model.parameters())
                self.reset()
                self.vocabulary = int(self.feed([0], every=False).shape[-1])
        except Exception as error:  # mlx-lm checks little, and raises anything over a strange folder
            raise TargetError(
                f"{folder}: mlx-lm cannot load it: {type(error).__name__} {one_line(error)}"
            ) from error
        self.reset()

    def _here(self) -> AbstractContextManager[Any]:
        import mlx.core as mx

        return mx.stream(self._device)

    @property
    def description(self) -> dict[str, Any]:
        return {
            "runtime": "MLX",
            "version": metadata.version("mlx"),
            "mlx_lm": metadata.version("mlx-lm"),
            "device": self._device_name,
            "threads": "MLX decides",
            "arithmetic": "float32" if self.float32 else "the file's types",
            "file": self.place.name,
            "architecture": self._config["model_type"],
        }

    def reset(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        if self._model is None:
            raise self.closed()
        self._cache = make_prompt_cache(self._model)

    def state_bytes(self) -> tuple[int, float]:
        """Bytes of the states, and of keys and values for each position, in the types of this session."""
        from mlx.utils import tree_reduce

        fixed, growing, waiting = 0, 0.0, list(self._cache)
        while waiting:
            cache = waiting.pop()
            waiting += getattr(cache, "caches", ())
            if (keys := getattr(cache, "keys", None)) is not None:
                growing += (keys.nbytes + cache.values.nbytes) / keys.shape[-2]
            elif not hasattr(cache, "caches"):
                fixed += tree_reduce(lambda total, array: total + getattr(array, "nbytes", 0), cache.state, 0)
        return fixed, growing

    def close(self) -> None:
        import mlx.core as mx

        self._model, self._cache = None, []
        mx.clear_cache()

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        import mlx.core as mx

        if self._model is None:
            raise self.closed()
        rows = []
        with self._here():
            for start in range(0, len(tokens), BATCH):
                chunk = tokens[start : start + BATCH]
                logits = self._model(mx.array([chunk]), cache=self._cache)[0]
                kept = logits if every else logits[-1:]
                mx.eval(kept, [cache.state for cache in self._cache])
                if every or start + len(chunk) == len(tokens):
                    rows.append(np.array(kept.astype(mx.float32)))
        return np.concatenate(rows)


def _widened(array: Any) -> Any:
    import mlx.core as mx

    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def file_contents(file: Path) -> Contents:
    """Lookups and experts by mlx-lm's names; states as a session keeps them."""
    config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
    counts = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts, chosen = next(filter(None, counts), 0), config.get("num_experts_per_tok")
    files = sorted(file.parent.glob("model*.safetensors"))
    arrays = [item for path in files for item in load_file(path).items()]
    untied = any(name.startswith("lm_head.") for name, _ in arrays)
    read = 0.0
    for name, array in arrays:
        owner, share = name.rpartition(".")[0], 1.0
        if owner.endswith(_EMBEDDINGS) and untied:
            share = 1 / array.shape[0]
        elif _EXPERTS in owner and chosen and experts:
            share = chosen / experts
        read += share * array.nbytes
    with MLXSession(file.parent) as session:
        session.step(0)
        fixed, growing = session.state_bytes()
    # In float32 here; the file's own types, which a GPU uses, have half of that.
    return Contents(read, fixed // 2, growing / 2)
