"""A latency table for llama.cpp: for each format a copy of the model, timed whole (`uniform.py`), and a fit (`fit.py`).

Whole models, because the library gives no access to one product the way a model runs it: everything else that a token
costs is in the times of the weights.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kl_lens.errors import TargetError
from kl_lens.formats import get_format
from kl_lens.records import Artifact, Component, SensitivityTable
from kl_lens.targets.gguf.contents import expert_share
from kl_lens.targets.gguf.fit import fit_formats
from kl_lens.targets.gguf.header import FileInfo
from kl_lens.targets.gguf.session import GGUFSession, open_session
from kl_lens.targets.gguf.uniform import uniform_copy
from kl_lens.targets.latency import LatencyProfile, LatencyRequest, format_of

PROMPT, TOKENS = 32, 16  # tokens before the timing, and of one timing


def fitted_latency(
    request: LatencyRequest,
    formats: Sequence[str],
    source: Path,
    artifact: Artifact,
    file: FileInfo,
    name: str,
) -> LatencyProfile:
    """`source` is the file that is copied, `artifact` its record; `file` says how many experts a token reads."""
    table = request.table
    experts = expert_share(file)
    shares = {c.name: _read_share(c, table, experts) for c in table.candidates}
    rows, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        copies = {fmt: Path(folder) / f"{fmt}.gguf" for fmt in formats}
        weights = {t.runtime_name: t for t in artifact.tensors if t.component in shares}
        for fmt, path in copies.items():
            changed = uniform_copy(source, path, get_format(fmt), weights)
            row: dict[str, float] = {}
            for tensor in weights.values():
                size = changed.get(tensor.runtime_name)
                held, size = (format_of(tensor.realised), tensor.bytes) if size is None else (fmt, size)
                row[held] = row.get(held, 0.0) + size * shares[tensor.component]
            rows.append({held: size for held, size in row.items() if size})
        times = _decode_times(request, copies)
        seconds = [statistics.median(times[fmt]) for fmt in copies]
    fit = fit_formats(rows, seconds)
    profile = LatencyProfile(
        name,
        {
            component.name: {
                fmt: per_byte * get_format(fmt).bytes(component.shape) * shares[component.name]
                for fmt, per_byte in fit.seconds_per_byte.items()
                if get_format(fmt).fits(component.shape) is None
            }
            for component in table.candidates
        },
        {
            "method": "fitted to decode times of whole copies in one format each, apportioned by bytes",
            "device": "GPU" if request.settings.gpu_layers else "CPU",
            "threads": request.settings.threads,
            "formats": list(fit.seconds_per_byte),
            "seconds_per_token": times,
            "seconds_per_byte": fit.seconds_per_byte,
            "rest": "in the times of the weights, from which it cannot be told apart",
            "largest_error": fit.largest_error,
        },
    )
    profile.check(request.measured)
    return profile


def _decode_times(request: LatencyRequest, copies: dict[str, Path]) -> dict[str, list[float]]:
    """Seconds per token of each copy, there and back: what warms up or slows down the machine meets all alike."""
    times: dict[str, list[float]] = {fmt: [] for fmt in copies}
    for order in (list(copies), list(reversed(copies))):
        for fmt in order:
            settings = request.settings
            with open_session(
                copies[fmt], threads=settings.threads, gpu_layers=settings.gpu_layers, load=settings.load
            ) as session:
                times[fmt] += [_seconds(session) for _ in range(request.repeats + 1)][1:]
            request.advanced(f"tokens in {fmt}")
    return times


def _seconds(session: GGUFSession) -> float:
    session.reset()
    random = np.random.default_rng(0)
    token = int(session.prefill(random.integers(0, session.vocabulary, PROMPT).tolist()).argmax())
    started = time.perf_counter()
    for _ in range(TOKENS):
        token = int(session.step(token).argmax())
    return (time.perf_counter() - started) / TOKENS


def require_artifacts(request: LatencyRequest, target: str) -> None:
    if not request.measured:
        raise TargetError(
            f"a latency table for {target} is measured on copies of an exported file and there is none; export one, "
            f"e.g. kl-lens export MODEL --target {target} --format fp16, and benchmark it"
        )


def _read_share(component: Component, table: SensitivityTable, experts: float) -> float:
    """How often one token reads a component's bytes: once per block that uses it, of experts those chosen."""
    if component.name == table.embedding != table.head:
        return 0.0
    return max(1, len(component.blocks)) * (experts if len(component.shape) == 3 else 1.0)
