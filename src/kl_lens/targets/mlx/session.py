"""A folder of mlx-lm running in MLX, and taken apart: every parameter beside what mlx-lm makes of the original."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kl_lens.base.errors import TargetError, one_line
from kl_lens.model import LoadedModel
from kl_lens.model.files import check_sizes
from kl_lens.targets.dissection import (
    FolderDissection,
    Part,
    StoredTensor,
    arrangements,
    known_name,
    unpacked,
)
from kl_lens.targets.exporting import CONFIG_FILE
from kl_lens.targets.mlx.layout import PARTS, Layout, as_tensor
from kl_lens.targets.session import Logits, Session, SessionSettings
from kl_lens.targets.tokenizer import read_json

# Tokens in one call of the model. The operations of a call wait in memory until it is computed; Mamba-1 has dozens for
# every token and layer.
BATCH = 128
CPU = "CPU"
GPU = "GPU"


class MLXSession(Session):
    """One sequence at a time through mlx-lm's model. On a CPU it computes in float32: the CPU kernels add up in the
    type of the activations, and in float16 their rounding would hide the loss of the weights. On a GPU it computes in
    the file's own types, as mlx-lm does, unless `exact` is set. Weights are the same in both cases."""

    def __init__(self, folder: Path, *, device: str = CPU, exact: bool = False) -> None:
        self.path = folder
        self._device_name = device
        self._device = mx.gpu if device == GPU else mx.cpu
        self.float32 = exact or device == CPU
        self._model: Any = None
        check_sizes(folder, read_json(folder / CONFIG_FILE))
        try:
            with self._here():
                self._model, self._config = load_model(folder, lazy=True)
                if self.float32:
                    self._model.update(tree_map(_widened, self._model.parameters()))
                mx.eval(self._model.parameters())
                self.reset()
                self.vocabulary = int(self.feed([0], every=False).shape[-1])
        except Exception as error:  # mlx-lm checks little, and raises anything
            raise TargetError(
                f"{folder}: mlx-lm cannot load it: {one_line(error)}"
            ) from error
        self.reset()

    def _here(self) -> AbstractContextManager[Any]:
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
            "file": self.path.name,
            "architecture": self._config["model_type"],
        }

    def reset(self) -> None:
        if self._model is None:
            raise self.closed()
        self._cache = make_prompt_cache(self._model)

    def close(self) -> None:
        self._model = None
        self._cache = []
        mx.clear_cache()

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        if self._model is None:
            raise self.closed()
        rows = []
        with self._here():
            for start in range(0, len(tokens), BATCH):
                chunk = tokens[start : start + BATCH]
                logits = self._model(mx.array([chunk]), cache=self._cache)[0]
                wanted = logits if every else logits[-1:]
                mx.eval(wanted, [cache.state for cache in self._cache])
                if every or start + len(chunk) == len(tokens):
                    rows.append(np.array(wanted.astype(mx.float32)))
        return np.concatenate(rows)


def _widened(array: Any) -> Any:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


class MLXDissection(FolderDissection):
    # Settings that transformers computes with, and mlx-lm does not.
    without_effect = re.compile(
        f"{FolderDissection.without_effect.pattern}|max_position|length"
    )

    def __init__(self, folder: Path, layout: Callable[[LoadedModel], Layout]) -> None:
        self._layout = layout
        check_sizes(folder, read_json(folder / CONFIG_FILE))
        super().__init__(folder)

    def stored(self, tensors: dict[str, torch.Tensor]) -> Iterator[StoredTensor]:
        for name, tensor in tensors.items():
            path, _, part = name.rpartition(".")
            if f"{path}.scales" not in tensors or part not in PARTS:
                yield unpacked(name, tensor)
            elif part == PARTS[0]:
                packed = [tensors.get(f"{path}.{part}") for part in PARTS]
                yield self._packed(path, [part for part in packed if part is not None])

    def parts(self, model: LoadedModel) -> list[Part]:
        layout = self._layout(model)
        stored = {tensor.name: tensor for tensor in self.tensors}
        weight = {
            component.name: component.weight for component in model.anatomy.components
        }
        parts = []
        for matrix in layout.matrices:
            name = f"{matrix.name}.weight"
            rows = (weight[matrix.component], matrix.arranged, matrix.factors)
            parts.append(Part(name, stored.get(name), *rows))
        for name, values in layout.values.items():
            source = weight.get(layout.sources[name])
            parameter = None if source is None else model.tensor(source)
            # Made from several, or from a part of one.
            if parameter is None or parameter.numel() != values.numel():
                parts.append(Part(name, stored.get(name), source, constant=values))
                continue
            (arrange,) = arrangements(
                [(parameter, tuple(values.shape), partial(torch.clone, values), False)]
            )
            parts.append(Part(name, stored.get(name), source, arrange))
        return parts

    def configuration(self, model: LoadedModel) -> dict[str, Any]:
        return self._layout(model).config

    def open(self, settings: SessionSettings) -> Session:
        return MLXSession(self.path, device=settings.device, exact=settings.exact)

    def _packed(self, path: str, parts: list[torch.Tensor]) -> StoredTensor:
        sections: dict[str, Any] = self.config.get("quantization") or {}
        section = {"mode": "affine", **sections, **(sections.get(path) or {})}
        scheme = {key: section[key] for key in ("group_size", "bits", "mode")}
        *rows, words = parts[0].shape
        shape = (*rows, words * 32 // scheme["bits"])
        spelled = f"{scheme['mode']}{scheme['bits']}-g{scheme['group_size']}"
        size = sum(part.nbytes for part in parts)
        read = partial(_values, parts, scheme)
        return StoredTensor(
            f"{path}.weight", spelled, shape, size, read, known_name(spelled)
        )


def _values(parts: list[torch.Tensor], scheme: dict[str, Any]) -> torch.Tensor:
    codes, *others = parts
    wide: list[Any] = [mx.array(part.float().numpy()) for part in others]
    with mx.stream(mx.cpu):
        values = mx.dequantize(mx.array(codes.numpy()), *wide, **scheme)
        return as_tensor(values.astype(mx.float32))
