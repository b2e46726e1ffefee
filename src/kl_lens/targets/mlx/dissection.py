"""A folder of mlx-lm taken apart: every parameter, dequantized by MLX, beside what mlx-lm makes of the original."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch

from kl_lens.base.errors import TargetError, one_line
from kl_lens.targets import dissection
from kl_lens.targets.dissection import Disagreement, Dissection, Part, StoredTensor
from kl_lens.targets.mlx.configuration import CONFIG_FILE
from kl_lens.targets.mlx.export import PARTS
from kl_lens.targets.mlx.session import MLXSession
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.formats import known_formats

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.targets.mlx.layout import Layout

_FLOATS = {mx.float32: "fp32", mx.float16: "fp16", mx.bfloat16: "bf16"}
# Settings of training and of transformers, which mlx-lm does not compute with.
_WITHOUT_EFFECT = re.compile(
    r"^_|dtype|version|use_cache|initializer|_token_id|dropout|architectures|max_position|length"
)


class MLXDissection(Dissection):
    def __init__(self, folder: Path, layout: Callable[[LoadedModel], Layout]) -> None:
        self.place, self._layout = folder, layout
        self.files = tuple(sorted(folder.glob("model*.safetensors")))
        self._config, arrays = read_json(folder / CONFIG_FILE), dict[str, Any]()
        try:
            for file in self.files:
                arrays |= mx.load(str(file))  # type: ignore[arg-type]
        except Exception as error:  # it raises anything over a damaged file
            raise TargetError(f"{file} is damaged: {one_line(error)}; export or download it again") from error
        quantized = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
        more = {f"{path}.{part}" for path in quantized for part in PARTS[1:]}
        self.tensors = tuple(self._stored(name, arrays) for name in arrays if name not in more)

    def parts(self, model: LoadedModel) -> list[Part]:
        layout, held = self._layout(model), {tensor.name: tensor for tensor in self.tensors}
        weight = {component.name: component.weight for component in model.anatomy.components}
        parts = [
            Part(f"{m.name}.weight", held.get(f"{m.name}.weight"), weight[m.component], m.arranged, m.factors)
            for m in layout.matrices
        ]
        for name, value in layout.values.items():
            values, source = torch.from_numpy(np.array(value)), weight.get(layout.sources[name])
            own = None if source is None else model.tensor(source)
            if own is None or own.numel() != values.numel():  # made from several, or from a part of one
                parts.append(Part(name, held.get(name), source, constant=values))
                continue
            (way,) = dissection.arrangements(
                [(own, tuple(values.shape), partial(torch.clone, values), False)]
            )
            parts.append(Part(name, held.get(name), source, way))
        return parts

    def settings(self, model: LoadedModel) -> list[Disagreement]:
        advice = f"take it from the original's {CONFIG_FILE}"
        return [
            dissection.setting(f"{CONFIG_FILE}: {key}", self._config[key], value, advice)
            for key, value in self._layout(model).config.items()
            if key in self._config and isinstance(value, int | float | str | list)
            if not _WITHOUT_EFFECT.search(key) and not dissection.same(self._config[key], value)
        ]

    def open(self, settings: SessionSettings) -> Session:
        return MLXSession(self.place, device=settings.device, exact=settings.exact)

    def _stored(self, name: str, arrays: dict[str, Any]) -> StoredTensor:
        array, path = arrays[name], name.removesuffix(".weight")
        parts = [arrays[f"{path}.{part}"] for part in PARTS if f"{path}.{part}" in arrays]
        if f"{path}.scales" not in arrays:
            kind = _FLOATS.get(array.dtype, "")
            spelled, shape, parts, how = kind or str(array.dtype), tuple(array.shape), [array], {}
        else:
            sections: dict[str, Any] = self._config.get("quantization") or {}
            section = {"mode": "affine", **sections, **(sections.get(path) or {})}
            how = {key: section[key] for key in ("group_size", "bits", "mode")}
            shape = (*array.shape[:-1], array.shape[-1] * 32 // how["bits"])
            spelled = f"{how['mode']}{how['bits']}-g{how['group_size']}"
            kind = spelled if spelled in known_formats() else ""
        size = sum(part.nbytes for part in parts)
        return StoredTensor(
            name, spelled, shape, size, partial(_values, parts, how), kind, dissection.rounding(kind)
        )


def _values(parts: list[Any], how: dict[str, Any]) -> torch.Tensor:
    with mx.stream(mx.cpu):
        whole = (
            mx.dequantize(parts[0], *(each.astype(mx.float32) for each in parts[1:]), **how)
            if how
            else parts[0]
        )
        return torch.from_numpy(np.array(whole.astype(mx.float32)))
