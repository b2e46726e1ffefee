"""Runs an exported image classifier: one image at a time, by the ids of `kl_lens.text.images`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov

from kl_lens.base.errors import TargetError
from kl_lens.targets.session import Logits
from kl_lens.text.images import Preparation, pixels_of

INPUT = "pixel_values"


class ImageSession:
    """A `kl_lens.targets.Session` for a model that has no next token."""

    def __init__(
        self, compiled: ov.CompiledModel, preparation: Preparation, description: dict[str, Any]
    ) -> None:
        self._request: Any = compiled.create_infer_request()
        self._preparation = preparation
        self._description = description
        self._classes = int(compiled.outputs[0].get_partial_shape()[1].get_length())

    @property
    def vocabulary(self) -> int:
        return self._classes

    @property
    def description(self) -> dict[str, Any]:
        return self._description

    def reset(self) -> None:
        """There is nothing to forget."""

    def logits(self, ids: Sequence[int]) -> Logits:
        if self._request is None:
            raise TargetError("this session is closed")
        rows = np.empty((len(ids), self._classes), np.float32)
        for row, image in zip(rows, self._preparation.normalised(pixels_of(ids)), strict=True):
            self._request.infer([image[None]])
            row[:] = self._request.get_output_tensor(0).data[0]
        return rows

    def prefill(self, ids: Sequence[int]) -> Logits:
        raise TargetError("this file classifies images; there are no prompts to feed it or to time")

    def step(self, token: int) -> Logits:
        raise TargetError("this file classifies images; there is no next token to ask for or to time")

    def close(self) -> None:
        self._request = None
