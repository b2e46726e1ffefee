"""`kl-lens measure`: the table of sensitivities."""

from __future__ import annotations

from typing import Any

from kl_lens.cli.console import console, table
from kl_lens.study.measure import MeasureResult


def as_json(result: MeasureResult) -> dict[str, Any]:
    return {"noise_floor": result.noise, "measurements": result.measurements}


def show(result: MeasureResult) -> None:
    rows = []
    for m in sorted(result.measurements, key=lambda m: m.metrics["kl_teacher_to_student"].value):
        kl = m.metrics["kl_teacher_to_student"]
        rows.append(
            {
                "component": m.component,
                "format": m.format,
                "KL, nats": f"{kl.value:.3e}{'' if kl.value > result.noise else ' (noise)'}",
                "±": f"{kl.standard_error:.1e}",
                "KL 99 %": f"{m.metrics['kl_p99'].value:.2e}",
                "MSE": f"{m.metrics['mse'].value:.2e}",
                "SQNR, dB": f"{m.metrics['sqnr_db'].value:.1f}",
                "ΔCE, nats": f"{m.metrics['delta_cross_entropy'].value:+.2e}",
                "same top": f"{m.metrics['same_top'].value:.2%}",
            }
        )
    sweep, out = result.sweep, console()
    products = "" if sweep.precision == "float32" else f", with products in {sweep.precision}"
    out.print(table(f"Sensitivity, from least to most (per {result.unit.removesuffix('s')})", rows))
    out.print(
        f"{sweep.candidates} candidates × {sweep.windows} windows ({sweep.tokens:,} {result.unit} each); "
        f"{sweep.measured} candidate × window pairs measured in {sweep.seconds:.1f} s, {sweep.reused} reused. "
        f"Noise floor: KL {result.noise:.1e}{products}."
    )
    if result.shard is not None:
        out.print(
            f"This is share {result.shard}. When all are done: kl-lens merge {result.folder.parent.parent}"
        )
    else:
        out.print(f"Next: kl-lens plan --run {result.folder}")
