"""Runs an IR that KL Lens did not export, with the inputs that optimum-intel and OpenVINO GenAI use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from kl_lens.base.errors import TargetError, UnsupportedError, last_line
from kl_lens.targets import quarantine
from kl_lens.targets.openvino.session import (
    ATTENTION_MASK,
    BEAM_IDX,
    compile_graph,
    describe,
    new_request,
    read_graph,
)
from kl_lens.targets.session import FedSession, Logits, SessionSettings

IDS, POSITIONS, CACHE_POSITION = "input_ids", "position_ids", "cache_position"
_PAST = ("past_key_values.", "cache_params.past.")  # states as inputs
# What a program gets that sets nothing; our own sessions ask for more.
_PLUGIN_DEFAULTS = {"KV_CACHE_PRECISION": "u8"}
_TRIED, _SAME = 12, 0.05  # tokens that show what cache_position means; a share of the range of logits


class ForeignSession(FedSession):
    """A graph without states reads everything again at each step."""

    def __init__(self, path: Path, settings: SessionSettings) -> None:
        graph = _feedable(path)
        self.place, self.stateful = path, bool(graph.get_variables())
        self._inputs, self._output = graph.inputs, _logits(graph)
        self.vocabulary = int(self._output.get_partial_shape()[2].get_length())
        self._compiled = compile_graph(
            graph, settings.device, exact=settings.exact, threads=settings.threads,
            settings={} if settings.exact or settings.device != "CPU" else _PLUGIN_DEFAULTS,
        )  # fmt: skip
        self.description = describe(self._compiled, settings.device)
        self._taps: int | None = None  # cache_position counts these, not tokens
        if CACHE_POSITION in _names(graph) and not self._steps_agree():
            # (1, channels, taps)
            shapes = [variable.get_info().data_shape for variable in graph.get_variables()]
            widths = sorted({s[2].get_length() for s in shapes if len(s) == 3 and s[2].is_static})
            self._taps = next(filter(self._steps_agree, widths), None)
        self.reset()

    def reset(self) -> None:
        self._request, self._fed = new_request(self._compiled), list[int]()

    def close(self) -> None:
        self._request = self._compiled = None

    def _steps_agree(self, taps: int | None = None) -> bool:
        """Whether a prompt gives the same at once and with its last token alone.

        `cache_position` is the tokens' positions in most graphs. In optimum-intel's Mamba it is the places of the
        convolution's state: all of them for a prompt, the last one for a token.
        """
        self._taps, ids = taps, [i % self.vocabulary for i in range(1, _TRIED + 1)]
        try:
            whole = self.logits(ids)[-1]
            self.logits(ids[:-1])
            single = self.step(ids[-1])
        except TargetError:
            return False
        return bool(np.abs(whole - single).max() <= _SAME * np.ptp(whole))

    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        if self._compiled is None:
            raise self.closed()
        start = len(self._fed) if self.stateful else 0
        self._fed += tokens
        taps = None if self._taps is None else np.arange(self._taps) if start == 0 else np.array([self._taps])
        positions = np.arange(start, len(self._fed))
        known: dict[str, npt.NDArray[Any]] = {
            IDS: np.array([self._fed[start:]]), ATTENTION_MASK: np.ones((1, len(self._fed))), BEAM_IDX: np.zeros(1),
            POSITIONS: positions[None], CACHE_POSITION: positions if taps is None else taps,
        }  # fmt: skip
        try:
            self._request.infer({port.get_any_name(): _fit(port, known) for port in self._inputs})
        except RuntimeError as error:
            raise TargetError(f"{self.place}: OpenVINO cannot run it: {last_line(error)}") from error
        rows = self._request.get_tensor(self._output.get_any_name()).data[0]
        return np.array(rows[-len(tokens) :], np.float32)


def _fit(port: Any, every: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """What an input wants, in its own type. States are empty, or zero where their size is fixed."""
    sizes = [d.get_length() if d.is_static else int(i == 0) for i, d in enumerate(port.get_partial_shape())]
    value = every.get(port.get_any_name())
    return (np.zeros(sizes) if value is None else value).astype(port.get_element_type().to_dtype())


def _feedable(path: Path) -> ov.Model:
    """The graph; UnsupportedError if it wants something that a language model does not get here."""
    graph = read_graph(path)
    names, shape = _names(graph), _logits(graph).get_partial_shape()
    known = {IDS, ATTENTION_MASK, POSITIONS, BEAM_IDX, CACHE_POSITION}
    if odd := sorted(name for name in names - known if not name.startswith(_PAST)):
        raise UnsupportedError(f"{path.name} has an input {odd[0]!r}, which KL Lens cannot feed")
    if IDS not in names or len(shape) != 3 or not shape[2].is_static:
        raise UnsupportedError(f"{path.name} is not a language model: expected {IDS} in and logits out")
    return graph


def _names(graph: ov.Model) -> set[str]:
    return {value.get_any_name() for value in graph.inputs}


def _logits(graph: ov.Model) -> Any:
    return next((value for value in graph.outputs if "logits" in value.get_names()), graph.outputs[0])


def open_foreign(path: Path, settings: SessionSettings) -> ForeignSession:
    """Opens it, after a try in a separate process."""
    _feedable(path)
    files = [file for file in (path, path.with_suffix(".bin")) if file.is_file()]
    quarantine.require_opens(try_out, path, files, "OpenVINO")
    return ForeignSession(path, settings)


def try_out(path: Path) -> None:
    session = ForeignSession(path, SessionSettings(threads=1))
    session.step(int(session.logits([0, 0])[-1].argmax()))
