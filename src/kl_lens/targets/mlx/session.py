"""A folder of mlx-lm running in MLX."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np

from kl_lens.base.errors import TargetError, one_line
from kl_lens.targets.session import Logits, checked_tokens

# Tokens in one call of the model. The operations of a call wait in memory until it is computed; Mamba-1 has dozens for
# every token and layer.
BATCH = 128
CPU, GPU = "CPU", "GPU"


class MLXSession:
    """One sequence at a time through mlx-lm's model. Satisfies `kl_lens.targets.Session`.

    On a CPU it computes in float32: the CPU kernels add up in the type of the activations, and in float16 their
    rounding would hide the loss of the weights. On a GPU it computes in the file's own types, as mlx-lm does, unless
    `exact` is set. Weights are the same in both cases.
    """

    def __init__(self, folder: Path, *, device: str = CPU, exact: bool = False) -> None:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        self.folder, self._device_name = folder, device
        self._device = mx.gpu if device == GPU else mx.cpu
        self.float32 = exact or device == CPU
        self._model: Any = None
        try:
            with self._here():
                self._model, self._config = load_model(folder, lazy=True)
                if self.float32:
                    self._model.update(tree_map(_widened, self._model.parameters()))
                mx.eval(self._model.parameters())
                self._vocabulary = 0
                self.reset()
                self._vocabulary = int(self._fed([0], every=False).shape[-1])
        except (
            Exception
        ) as error:  # mlx-lm checks little; what it raises over a strange folder can be anything
            raise TargetError(
                f"{folder}: mlx-lm cannot load it: {type(error).__name__} {one_line(error)}"
            ) from error
        self.reset()

    def _here(self) -> AbstractContextManager[Any]:
        import mlx.core as mx

        return mx.stream(self._device)

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def description(self) -> dict[str, Any]:
        return {
            "runtime": "MLX",
            "version": metadata.version("mlx"),
            "mlx_lm": metadata.version("mlx-lm"),
            "device": self._device_name,
            "threads": "MLX decides",
            "arithmetic": "float32" if self.float32 else "the file's types",
            "file": self.folder.name,
            "architecture": self._config["model_type"],
        }

    def reset(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = make_prompt_cache(self._open_model)

    def prefill(self, ids: Sequence[int]) -> Logits:
        return self._feed(ids, every=False)[-1]

    def step(self, token: int) -> Logits:
        return self._feed([token], every=False)[-1]

    def logits(self, ids: Sequence[int]) -> Logits:
        self.reset()
        return self._feed(ids, every=True)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open_model(self) -> Any:
        if self._model is None:
            raise TargetError(f"{self.folder}: this session is closed")
        return self._model

    def _feed(self, ids: Sequence[int], *, every: bool) -> Logits:
        model = self._open_model
        assert model is not None
        return self._fed(checked_tokens(ids, self._vocabulary, str(self.folder)), every=every)

    def _fed(self, tokens: list[int], *, every: bool) -> Logits:
        """Logits after every token, or only after the last."""
        import mlx.core as mx

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
