"""`kl-lens measure`: the table of sensitivities."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.cli.estimates import show_estimate
from kl_lens.pipeline.costs import JobEstimate
from kl_lens.pipeline.measuring import MeasureResult
from kl_lens.positions import GROWS


def as_json(result: MeasureResult | JobEstimate) -> dict[str, Any]:
    if isinstance(result, JobEstimate):
        return asdict(result) | {"seconds": result.seconds, "disk": result.disk}
    measured = {"noise_floor": result.noise, "measurements": [m.to_json() for m in result.measurements]}
    if not result.curves:
        return measured
    return measured | {
        "positions": [
            {"component": key[0], "format": key[1], "trend": curve.trend, **asdict(curve)}
            for key, curve in result.curves.items()
        ]
    }


def show(result: MeasureResult | JobEstimate) -> None:
    if isinstance(result, JobEstimate):
        show_estimate(result)
        return
    if result.curves:
        _show_positions(result)
        return
    numbers = ("KL, nats", "±", "KL 99 %", "MSE", "SQNR, dB", "ΔCE, nats", "same top")
    title = f"Sensitivity, from least to most (per {result.unit.removesuffix('s')})"
    table = new_table(title, ("component", "format"), numbers)
    for m in sorted(result.measurements, key=lambda m: m.metrics["kl_teacher_to_student"].value):
        kl = m.metrics["kl_teacher_to_student"]
        mark = "" if kl.value > result.noise else " (noise)"
        table.add_row(
            m.component,
            m.format,
            f"{kl.value:.3e}{mark}",
            f"{kl.standard_error:.1e}",
            f"{m.metrics['kl_p99'].value:.2e}",
            f"{m.metrics['mse'].value:.2e}",
            f"{m.metrics['sqnr_db'].value:.1f}",
            f"{m.metrics['delta_cross_entropy'].value:+.2e}",
            f"{m.metrics['same_top'].value:.2%}",
        )
    sweep, out = result.sweep, console()
    products = "" if sweep.precision == "float32" else f", with products in {sweep.precision}"
    out.print(table)
    out.print(
        f"{sweep.candidates} candidates × {sweep.windows} windows ({sweep.tokens:,} {result.unit} each); "
        f"{sweep.measured} candidate × window pairs measured in {sweep.seconds:.1f} s, {sweep.reused} reused. "
        f"Noise floor: KL {result.noise:.1e}{products}."
    )
    if sweep.settled is not None:
        out.print(f"The ranking is {sweep.settled} after {sweep.tokens:,} {result.unit}.")
    if result.shard is not None:
        out.print(
            f"This is share {result.shard}. When all are done: kl-lens merge {result.folder.parent.parent}"
        )
    else:
        out.print(f"Next: kl-lens plan --run {result.folder}")


def _show_positions(result: MeasureResult) -> None:
    """From the fastest growing to the fastest falling, and how many of each family grow."""
    table = new_table(
        "KL by position, from what grows most, nats per token",
        ("component", "format"),
        ("first bin", "last bin", "slope per 1,000 tokens", "±"),
        ("trend",),
    )
    counts: dict[str, list[int]] = {}
    order = sorted(
        result.curves.items(), key=lambda item: -item[1].slope.value / (item[1].means[0].value or 1)
    )
    for (component, recipe), curve in order:
        count = counts.setdefault(result.families[component], [0, 0])
        count[0] += curve.trend == GROWS
        count[1] += 1
        slope = curve.slope
        ends = [f"{curve.means[index].value:.3e}" for index in (0, -1)]
        table.add_row(
            component, recipe, *ends, f"{slope.value:+.1e}", f"{slope.standard_error:.1e}", curve.trend
        )
    out, sweep = console(), result.sweep
    out.print(table)
    grown = "; ".join(f"{family}: {grows} of {of}" for family, (grows, of) in counts.items())
    out.print(
        f"Grows with 95 % confidence: {grown}. By chance alone about 2.5 % would. {sweep.windows} windows, "
        f"{sweep.tokens:,} {result.unit} in all."
    )
