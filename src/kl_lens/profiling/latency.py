"""The latency table that `kl-lens plan --max-latency` reads: {component: {format: seconds}}.

The seconds of all components add up to the time of one generated token. With OpenVINO, weights that a plan decides
about have the times of their products, and everything else (scans, norms, sampling, the runtime itself) is the time of
the components that it does not decide about. With llama.cpp everything is in the times of the weights (`fit.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_lens.errors import FormatError, TargetError
from kl_lens.formats import get_format, resolve
from kl_lens.profiling.contents import expert_share
from kl_lens.profiling.fit import fit_formats
from kl_lens.profiling.layers import products_of, time_products
from kl_lens.profiling.subjects import Subject
from kl_lens.records import Component, Profile, SensitivityTable

FP16 = "fp16"
KIND, PROTOCOL_KIND = "latency", "latency_protocol"  # of the run's records


@dataclass
class LatencyProfile:
    """Seconds per component and format, and how they were found."""

    name: str
    seconds: dict[str, dict[str, float]]
    protocol: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)  # artifacts: predicted and measured seconds

    def predicted(self, formats: Mapping[str, str]) -> float:
        """Seconds per token of a model with these formats; components not named are FP16."""
        return math.fsum(
            row.get(formats.get(name, FP16), row.get(FP16, 0.0)) for name, row in self.seconds.items()
        )


def storable(target: str, formats: Sequence[str]) -> list[str]:
    """FP16, and those of the formats that a target can hold."""
    kept = [FP16]
    for name in formats:
        fmt = get_format(name)
        if fmt.name == FP16 or name.endswith("-absmax"):
            continue
        if target == "openvino":
            from kl_lens.targets.openvino import PROFILES

            fits = PROFILES["cpu"].holds(fmt) is None
        else:
            from kl_lens.targets.gguf.export import STAND_INS

            fits = fmt.name in STAND_INS
        if fits:
            kept.append(fmt.name)
    return list(dict.fromkeys(kept))


def openvino_latency(
    table: SensitivityTable,
    formats: Sequence[str],
    measured: Sequence[tuple[Subject, Profile]],
    *,
    device: str = "CPU",
    threads: int | None = None,
    repeats: int = 5,
    advanced: Callable[[str], None] = lambda what: None,
) -> LatencyProfile:
    """Every weight's product timed alone; the rest from artifacts that were benchmarked whole."""
    formats = storable("openvino", formats)
    multiplied = [c for c in table.candidates if c.name != table.embedding or table.embedding == table.head]
    wanted = products_of(multiplied, formats)
    parameters = sum(c.parameters for c in table.components)
    times = time_products(
        wanted.values(),
        model_parameters=parameters,
        device=device,
        threads=threads,
        repeats=repeats,
        advanced=advanced,
    )
    seconds: dict[str, dict[str, float]] = {c.name: {} for c in table.candidates}
    for component in multiplied:
        for name in formats:
            if product := wanted.get((component.name, name)):
                seconds[component.name][name] = times[product].median * _products(component)
    for component in table.candidates:
        if not seconds[component.name]:  # rows are looked up: next to nothing
            seconds[component.name] = {name: 0.0 for name in formats if _fits(name, component)}
    profile = LatencyProfile(
        f"openvino-{device}",
        seconds,
        {
            "method": "each weight's product with one token, alone in a compiled graph",
            "device": device,
            "threads": threads,
            "repeats": repeats,
            "formats": formats,
            "products": [
                {"rows": p.rows, "columns": p.columns, "format": p.format, "seconds": s.to_json()}
                for p, s in times.items()
            ],
        },
    )
    _settle_rest(profile, table, measured)
    return profile


def gguf_latency(
    table: SensitivityTable, measured: Sequence[tuple[Subject, Profile]], *, device: str = "CPU"
) -> LatencyProfile:
    """By a fit to whole artifacts; see `fit.py`."""
    exported = [(s, p) for s, p in measured if s.artifact is not None]
    if not exported:
        raise TargetError(
            "a latency table for gguf is fitted to exported artifacts and there are none; export uniform ones, e.g. "
            "kl-lens export MODEL --target gguf --format q8_0, and benchmark them"
        )
    components = {c.name: c for c in table.candidates}
    experts = expert_share(exported[0][0].path)
    shares = {c.name: _read_share(c, table, experts) for c in table.candidates}
    rows = []
    for subject, _ in exported:
        assert subject.artifact is not None
        row: dict[str, float] = {}
        for tensor in subject.artifact.tensors:
            if tensor.component in components:
                share = shares[tensor.component]
                row[tensor.realised] = row.get(tensor.realised, 0.0) + tensor.bytes * share
        rows.append({name: size for name, size in row.items() if size})
    fit = fit_formats(rows, [p.timings["seconds_per_token"].median for _, p in exported])
    seconds = {
        component.name: {
            name: per_byte * get_format(name).bytes(component.shape) * shares[component.name]
            for name, per_byte in fit.seconds_per_byte.items()
            if _fits(name, component)
        }
        for component in table.candidates
    }
    profile = LatencyProfile(
        f"gguf-{device}",
        seconds,
        {
            "method": "fitted to decode times of whole artifacts, apportioned by bytes",
            "device": device,
            "threads": exported[0][1].threads,
            "formats": list(fit.seconds_per_byte),
            "seconds_per_byte": fit.seconds_per_byte,
            "rest": "in the times of the weights, from which it cannot be told apart",
            "largest_error": fit.largest_error,
        },
    )
    _check(profile, exported)
    return profile


def _settle_rest(
    profile: LatencyProfile, table: SensitivityTable, measured: Sequence[tuple[Subject, Profile]]
) -> None:
    """What whole models take beyond their products: the median over those that were benchmarked."""
    exported = [(s, p) for s, p in measured if s.artifact is not None and s.static_tokens is None]
    if not exported:
        profile.protocol["rest"] = (
            "not known: no artifact was benchmarked; times are those of the weights alone"
        )
        return
    over = [p.timings["seconds_per_token"].median - profile.predicted(realised(s)) for s, p in exported]
    rest = max(0.0, statistics.median(over))
    profile.protocol["rest"] = f"median of {len(over)} artifacts, measured minus predicted"
    profile.protocol["rest_seconds"] = rest
    # Time that no plan can change is that of the components that no plan decides about, in equal parts.
    fixed = [c.name for c in table.components if not c.quantizable]
    profile.seconds.update({name: {FP16: rest / len(fixed)} for name in fixed})
    _check(profile, exported)


def _check(profile: LatencyProfile, measured: Sequence[tuple[Subject, Profile]]) -> None:
    for subject, whole in measured:
        profile.checks.append(
            {
                "subject": subject.name,
                "predicted": profile.predicted(realised(subject)),
                "measured": whole.timings["seconds_per_token"].median,
            }
        )
    profile.protocol["checks"] = profile.checks


def realised(subject: Subject) -> dict[str, str]:
    """Component → the format that it has in an artifact."""
    assert subject.artifact is not None
    return {t.component: t.realised for t in subject.artifact.tensors}


def _fits(name: str, component: Component) -> bool:
    try:
        return resolve(name, component.shape)[0].name == get_format(name).name
    except FormatError:
        return False


def _products(component: Component) -> int:
    """How many products of its last two dimensions one token makes with a component: experts × blocks that use it."""
    experts = component.shape[0] if len(component.shape) == 3 else 1
    return experts * max(1, len(component.blocks))


def _read_share(component: Component, table: SensitivityTable, experts: float) -> float:
    """How often one token reads a component's bytes: once per block that uses it, of experts those chosen."""
    if component.name == table.embedding != table.head:
        return 0.0
    return max(1, len(component.blocks)) * (experts if len(component.shape) == 3 else 1.0)
