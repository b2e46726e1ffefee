"""A latency table for llama.cpp, by a fit to whole artifacts (`fit.py`): everything is in the times of the weights."""

from __future__ import annotations

from kl_lens.errors import TargetError
from kl_lens.formats import get_format
from kl_lens.records import Component, SensitivityTable
from kl_lens.targets.gguf.contents import expert_share
from kl_lens.targets.gguf.fit import fit_formats
from kl_lens.targets.gguf.header import FileInfo
from kl_lens.targets.latency import LatencyProfile, LatencyRequest, format_of


def fitted_latency(request: LatencyRequest, file: FileInfo, name: str, device: str) -> LatencyProfile:
    """`file` is one of the artifacts': it says how many experts a token reads."""
    table, measured = request.table, request.measured
    components = {c.name: c for c in table.candidates}
    experts = expert_share(file)
    shares = {c.name: _read_share(c, table, experts) for c in table.candidates}
    rows = []
    for whole in measured:
        row: dict[str, float] = {}
        for tensor in whole.artifact.tensors:
            if tensor.component in components:
                fmt = format_of(tensor.realised)
                row[fmt] = row.get(fmt, 0.0) + tensor.bytes * shares[tensor.component]
        rows.append({fmt: size for fmt, size in row.items() if size})
    fit = fit_formats(rows, [whole.seconds_per_token for whole in measured])
    seconds = {
        component.name: {
            fmt: per_byte * get_format(fmt).bytes(component.shape) * shares[component.name]
            for fmt, per_byte in fit.seconds_per_byte.items()
            if get_format(fmt).fits(component.shape) is None
        }
        for component in table.candidates
    }
    profile = LatencyProfile(
        name,
        seconds,
        {
            "method": "fitted to decode times of whole artifacts, apportioned by bytes",
            "device": device,
            "threads": measured[0].threads,
            "formats": list(fit.seconds_per_byte),
            "seconds_per_byte": fit.seconds_per_byte,
            "rest": "in the times of the weights, from which it cannot be told apart",
            "largest_error": fit.largest_error,
        },
    )
    profile.check(measured)
    return profile


def require_artifacts(request: LatencyRequest, target: str) -> None:
    if not request.measured:
        raise TargetError(
            f"a latency table for {target} is fitted to exported artifacts and there are none; export uniform ones, "
            f"e.g. kl-lens export MODEL --target {target} --format q8_0, and benchmark them"
        )


def _read_share(component: Component, table: SensitivityTable, experts: float) -> float:
    """How often one token reads a component's bytes: once per block that uses it, of experts those chosen."""
    if component.name == table.embedding != table.head:
        return 0.0
    return max(1, len(component.blocks)) * (experts if len(component.shape) == 3 else 1.0)
