"""A latency table for OpenVINO. The product with every weight is timed alone.

The rest of a token (scans, norms, sampling, the runtime itself) comes from artifacts that were timed whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kl_lens.formats import get_format
from kl_lens.records import Component, SensitivityTable
from kl_lens.targets.latency import LatencyProfile, LatencyRequest
from kl_lens.targets.openvino.products import Product, products_of, time_products


def wanted_products(table: SensitivityTable, formats: Sequence[str]) -> dict[tuple[str, str], Product]:
    """(component, format) → the product to time, for all components that are multiplied with."""
    multiplied = [c for c in table.candidates if c.name != table.embedding or table.embedding == table.head]
    return products_of(multiplied, formats)


def product_latency(request: LatencyRequest, formats: Sequence[str], name: str) -> LatencyProfile:
    table, settings = request.table, request.settings
    wanted = wanted_products(table, formats)
    times = time_products(
        wanted.values(),
        model_parameters=sum(c.parameters for c in table.components),
        device=settings.device,
        threads=settings.threads,
        repeats=request.repeats,
        cache=request.cache_bytes,
        advanced=request.advanced,
    )
    seconds: dict[str, dict[str, float]] = {}
    for component in table.candidates:
        row = {fmt: wanted[component.name, fmt] for fmt in formats if (component.name, fmt) in wanted}
        seconds[component.name] = {
            fmt: statistics.median(times[product]) * _products(component) for fmt, product in row.items()
        } or {  # rows are looked up: next to nothing
            fmt: 0.0 for fmt in formats if get_format(fmt).fits(component.shape) is None
        }
    profile = LatencyProfile(
        name,
        seconds,
        {
            "method": "each weight's product with one token, alone in a compiled graph",
            "device": settings.device,
            "threads": settings.threads,
            "repeats": request.repeats,
            "formats": list(formats),
            "products": [
                {"rows": p.rows, "columns": p.columns, "format": p.format, "seconds": rounds}
                for p, rounds in times.items()
            ],
        },
    )
    _settle_rest(profile, request)
    return profile


def _settle_rest(profile: LatencyProfile, request: LatencyRequest) -> None:
    """Sets the time of a token beyond its products: the median over the benchmarked artifacts."""
    measured = [whole for whole in request.measured if not whole.artifact.settings.get("static_tokens")]
    weights = [profile.predicted(whole.realised) for whole in measured]
    over = [m.seconds_per_token - w for m, w in zip(measured, weights, strict=True) if w is not None]
    if over:
        profile.settle_rest(over, request.table, "artifacts")
    else:
        profile.protocol["rest"] = (
            "not known: no artifact was benchmarked; times are those of the weights alone"
        )
    profile.check(measured)


def _products(component: Component) -> int:
    """How many matrix products one token makes with a component: experts × blocks that use it."""
    experts = component.shape[0] if len(component.shape) == 3 else 1
    return experts * max(1, len(component.blocks))
