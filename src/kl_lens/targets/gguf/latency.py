"""A latency table for llama.cpp. For each format, a copy of the model (`uniform.py`) runs, and every weight's operation
is timed inside it (`tracing.py`). The whole model is timed too, for the part that belongs to no weight.

A kernel's speed depends on the shape: ggml's tiles need a number of rows that is a multiple of theirs, and other shapes
are slower. So there is one time per shape and format: the median over all weights of that shape and all tokens.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kl_lens.errors import TargetError
from kl_lens.formats import get_format
from kl_lens.records import Artifact
from kl_lens.targets.gguf.header import FileInfo
from kl_lens.targets.gguf.library import find_library
from kl_lens.targets.gguf.session import GGUFSession, open_session
from kl_lens.targets.gguf.tracing import Tracer
from kl_lens.targets.gguf.uniform import uniform_copy
from kl_lens.targets.latency import LatencyProfile, LatencyRequest, format_of

PROMPT, TOKENS = 32, 16  # before the timing (models without attention), and per timing


@dataclass(frozen=True)
class Operation:
    """What one kernel's speed depends on."""

    shape: tuple[int, ...]
    format: str
    kind: int  # ggml's operation: product, product with chosen experts, look-up


Copy = Mapping[str, str]  # tensor → its format in a copy


class Kernels:
    """Seconds of every traced operation, and the operations of each component for one token."""

    def __init__(self, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._component_of, self._shapes = tensors, shapes
        self.timed: dict[Operation, list[float]] = defaultdict(list)
        self._uses: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)

    def add(self, copy: Copy, traced: Mapping[tuple[str, int], list[float]], tokens: int) -> None:
        for (tensor, kind), each in traced.items():
            self.timed[Operation(self._shapes[tensor], copy[tensor], kind)] += each
            self._uses[self._component_of[tensor]][tensor, kind] = len(each) / tokens

    @cached_property
    def medians(self) -> dict[Operation, float]:
        return {operation: statistics.median(each) for operation, each in self.timed.items()}

    def seconds(self, component: str, held: Copy) -> float | None:
        """Seconds of one token; None if the shape was not timed in this format."""
        total = 0.0
        for (tensor, kind), times in self._uses[component].items():
            median = self.medians.get(Operation(self._shapes[tensor], held[tensor], kind))
            if median is None:
                return None
            total += times * median
        return total


def traced_latency(
    request: LatencyRequest,
    formats: Sequence[str],
    source: Path,
    artifact: Artifact,
    file: FileInfo,
    name: str,
) -> LatencyProfile:
    """`source`: the file to copy, `artifact`: its record, `file`: its header."""
    candidates = {component.name: component for component in request.table.candidates}
    weights = {t.runtime_name: t for t in artifact.tensors if t.component in candidates}
    tracers = {fmt: Tracer(find_library(), weights) for fmt in formats}
    copies: dict[str, Copy] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {fmt: Path(folder) / f"{fmt}.gguf" for fmt in formats}
        for fmt, path in paths.items():
            changed = uniform_copy(source, path, get_format(fmt), weights)
            copies[fmt] = {n: fmt if n in changed else format_of(t.realised) for n, t in weights.items()}
        whole = _decode_times(request, paths, tracers)
    kernels = Kernels({n: t.component for n, t in weights.items()}, {e.name: e.shape for e in file.tensors})
    for fmt, tracer in tracers.items():
        tracer.require_all()
        kernels.add(copies[fmt], tracer.seconds, 2 * request.repeats * TOKENS)
    components = dict.fromkeys(t.component for t in weights.values())
    seconds: dict[str, dict[str, float]] = {component: {} for component in components}
    for component, row in seconds.items():
        for fmt in formats:
            found = kernels.seconds(component, dict.fromkeys(weights, fmt))
            if found is not None and get_format(fmt).fits(candidates[component].shape) is None:
                row[fmt] = found
    measured = {fmt: statistics.median(times) for fmt, times in whole.items()}
    products = {
        fmt: math.fsum(kernels.seconds(component, copy) or 0.0 for component in components)
        for fmt, copy in copies.items()
    }
    profile = LatencyProfile(
        name,
        seconds,
        {
            "method": "each weight's operation timed inside copies of the model in one format each, by shape",
            "device": "GPU" if request.settings.gpu_layers else "CPU",
            "formats": list(formats),
            "operations": [
                {
                    "shape": o.shape,
                    "format": o.format,
                    "kind": o.kind,
                    "seconds": s,
                    "timed": len(kernels.timed[o]),
                }
                for o, s in kernels.medians.items()
            ],
            "seconds_per_token": whole,
        },
    )
    rest = profile.settle_rest([measured[fmt] - products[fmt] for fmt in formats], request.table, "copies")
    profile.protocol["copies"] = {
        fmt: {"predicted": products[fmt] + rest, "measured": measured[fmt]} for fmt in formats
    }
    profile.check(request.measured)
    return profile


def _decode_times(
    request: LatencyRequest, copies: Mapping[str, Path], tracers: Mapping[str, Tracer]
) -> dict[str, list[float]]:
    """Seconds per token of each copy. Copies take turns, forward and back, so that slow phases affect all of them."""
    times: dict[str, list[float]] = {fmt: [] for fmt in copies}
    settings = request.settings
    how: dict[str, Any] = {
        "threads": settings.threads, "gpu_layers": settings.gpu_layers, "load": settings.load
    }  # fmt: skip
    room = request.prompt_tokens + TOKENS * (request.repeats + 1)
    for order in (list(copies), list(copies)[::-1]):
        for fmt in order:
            tracer = tracers[fmt]
            with (
                open_session(copies[fmt], context=room, **how) as session,
                session.watched(tracer.callback) as watched,
            ):
                for each in (session, watched):
                    # Attention slows with the context; other layers do not.
                    each.prefill([0] * (PROMPT if each.endless else request.prompt_tokens))
                for number in range(request.repeats + 1):  # the first is a warm-up
                    seconds = _decode(session)
                    times[fmt] += [seconds] if number else []
                    tracer.recording = number > 0
                    _decode(watched)
                    tracer.recording = False
            request.advanced(f"tokens in {fmt}")
    return times


def _decode(session: GGUFSession) -> float:
    """Seconds per token, including the choice of the likeliest token."""
    started, token = time.perf_counter(), 0
    for _ in range(TOKENS):
        token = int(session.step(token).argmax())
    return (time.perf_counter() - started) / TOKENS


def require_artifacts(request: LatencyRequest, target: str) -> None:
    if not request.measured:
        raise TargetError(
            f"a latency table for {target} is measured on copies of an exported file, but there is none; export one, "
            f"e.g. kl-lens export MODEL --target {target} --format fp16, and benchmark it"
        )
