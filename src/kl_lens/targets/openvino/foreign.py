"""Runs an IR that KL Lens did not export, with the inputs that optimum-intel and OpenVINO GenAI use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.errors import TargetError, UnsupportedError, last_line
from kl_lens.targets import quarantine
from kl_lens.targets.openvino.session import (
    ATTENTION_MASK,
    BEAM_IDX,
    compile_graph,
    describe,
    new_request,
    read_graph,
)
from kl_lens.targets.session import Logits, SessionSettings, checked_tokens

IDS, POSITIONS = "input_ids", "position_ids"
# What a program gets that sets nothing; our own sessions ask for more.
_PLUGIN_DEFAULTS = {"KV_CACHE_PRECISION": "u8"}


class ForeignSession:
    """Satisfies `kl_lens.targets.Session`. A graph without states reads everything again at each step."""

    def __init__(self, path: Path, settings: SessionSettings) -> None:
        graph = read_graph(path)
        self._path, self._device, self.stateful = path, settings.device, bool(graph.get_variables())
        self._names = {value.get_any_name() for value in graph.inputs}
        if odd := sorted(self._names - {IDS, ATTENTION_MASK, POSITIONS, BEAM_IDX}):
            raise UnsupportedError(f"{path}: it has an input {odd[0]!r}, which KL Lens cannot feed")
        shape = graph.outputs[0].get_partial_shape()
        if IDS not in self._names or len(shape) != 3 or not shape[2].is_static:
            raise UnsupportedError(f"{path} is not a language model: expected {IDS} in and logits out")
        self._vocabulary = int(shape[2].get_length())
        self._compiled = compile_graph(
            graph, settings.device, exact=settings.exact, threads=settings.threads,
            settings={} if settings.exact or settings.device != "CPU" else _PLUGIN_DEFAULTS,
        )  # fmt: skip
        self.reset()

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def description(self) -> dict[str, Any]:
        return describe(self._compiled, self._device)

    def reset(self) -> None:
        self._request, self._fed = new_request(self._compiled), list[int]()

    def prefill(self, ids: Sequence[int]) -> Logits:
        return self._feed(ids)[-1]

    def step(self, token: int) -> Logits:
        return self._feed([token])[-1]

    def logits(self, ids: Sequence[int]) -> Logits:
        self.reset()
        return self._feed(ids)

    def close(self) -> None:
        self._request = self._compiled = None

    def _feed(self, ids: Sequence[int]) -> Logits:
        new = checked_tokens(ids, self._vocabulary, str(self._path))
        start = len(self._fed) if self.stateful else 0
        self._fed += new
        tokens = np.array([self._fed[start:]], np.int64)
        every = {
            IDS: tokens,
            ATTENTION_MASK: np.ones((1, len(self._fed)), np.int64),
            POSITIONS: np.arange(start, len(self._fed))[None],
            BEAM_IDX: np.zeros(1, np.int32),
        }
        try:
            self._request.infer({name: every[name] for name in self._names})
        except RuntimeError as error:
            raise TargetError(f"{self._path}: OpenVINO cannot run it: {last_line(error)}") from error
        return np.array(self._request.get_output_tensor(0).data[0, -len(new) :], np.float32)


def open_foreign(path: Path, settings: SessionSettings) -> ForeignSession:
    """Opens it, after a try in a separate process."""
    files = [file for file in (path, path.with_suffix(".bin")) if file.is_file()]
    quarantine.require_opens(__name__, path, files, "OpenVINO")
    return ForeignSession(path, settings)


def try_out(path: Path) -> None:
    session = ForeignSession(path, SessionSettings(threads=1))
    logits = session.logits([0, min(1, session.vocabulary - 1)])
    session.step(int(logits[-1].argmax()))
