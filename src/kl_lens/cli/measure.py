"""`kl-lens measure MODEL`: how much each component suffers from each format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from kl_lens.cli import options
from kl_lens.cli.progress import sweep_progress
from kl_lens.errors import KLLensError
from kl_lens.paper import write_legacy
from kl_lens.records import Measurement
from kl_lens.runs import CALIBRATION, Run
from kl_lens.sensitivity.engines import ENGINES
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.sweep import Sweep, SweepResult
from kl_lens.targets import TARGETS, deployed
from kl_lens.text import draw_windows
from kl_lens.units import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, optional=True)
    options.add_run(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument("--formats", default="int4,int8", help="comma-separated (default: int4,int8)")
    group.add_argument("--components", metavar="REGEX", help="only components whose name matches")
    options.add_text(parser)
    group = parser.add_argument_group("how")
    group.add_argument(
        "--engine", choices=tuple(ENGINES), default="fast", help="default: fast; plain is the reference"
    )
    group.add_argument("--memory-budget", default="8GB", help="for cached states (default: 8GB)")
    group.add_argument(
        "--as-deployed",
        choices=tuple(TARGETS),
        help="also quantize the activations as this target's kernels do: the KL of the file that will run",
    )
    group.add_argument(
        "--anytime", action="store_true", help="stop as soon as the ranking is settled; --windows is the most"
    )
    group.add_argument(
        "--settled-at",
        type=float,
        default=0.9,
        metavar="TAU",
        help="Kendall τ that counts as settled (default: 0.9)",
    )
    group.add_argument(
        "--legacy-json",
        metavar="FILE",
        type=Path,
        help="also write the published layout, one file per bit width",
    )
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    model = options.load_model(arguments)
    formats = [name.strip() for name in arguments.formats.split(",") if name.strip()]
    if not formats:
        raise KLLensError("--formats names no format; `int4,int8` is the default")
    candidates, unfit = find_candidates(model.anatomy, formats, arguments.components)
    windows = draw_windows(
        arguments.text,
        model.require_tokenizer(),
        windows=arguments.windows,
        length=arguments.window_length,
        seed=arguments.seed,
    )
    folder = options.run_folder(arguments, model.name)
    budget = parse_bytes(arguments.memory_budget)
    with Run.create(folder) as run:
        run.note_command(sys.argv)
        try:
            with sweep_progress("measuring") as progress:
                sweep = Sweep(
                    model,
                    run,
                    arguments.engine,
                    budget,
                    progress,
                    deployed(arguments.as_deployed) if arguments.as_deployed else None,
                    arguments.as_deployed or "weights",
                )
                if arguments.anytime:
                    result = sweep.measure_until_settled(candidates, windows, threshold=arguments.settled_at)
                else:
                    result = sweep.measure(candidates, windows)
        except KeyboardInterrupt:
            print(
                f"\nkl-lens measure: stopped; {folder} keeps what was measured. The same command goes on from there.",
                file=sys.stderr,
            )
            return 130
        for component, name, reason in unfit:
            print(f"kl-lens measure: {component.name} was not measured in {name}: {reason}", file=sys.stderr)
        measurements = run.measurements(CALIBRATION)
        noise = (run.load("noise", CALIBRATION) or {}).get("kl_teacher_to_student", 0.0)
        if arguments.legacy_json:
            for path in write_legacy(arguments.legacy_json, measurements):
                print(f"wrote {path}", file=sys.stderr)
    if arguments.json:
        options.print_json({"noise_floor": noise, "measurements": [m.to_json() for m in measurements]})
    else:
        _print(measurements, result, noise, folder)
    return 0


def _print(measurements: list[Measurement], result: SweepResult, noise: float, folder: Path) -> None:
    console = options.console()
    table = Table(title="Sensitivity, from least to most (per token)", title_justify="left")
    table.add_column("component")
    table.add_column("format")
    for column in ("KL, nats", "±", "KL 99 %", "MSE", "SQNR, dB", "ΔCE, nats", "same top"):
        table.add_column(column, justify="right")
    for m in sorted(measurements, key=lambda m: m.metrics["kl_teacher_to_student"].value):
        kl = m.metrics["kl_teacher_to_student"]
        mark = "" if kl.value > noise else " (noise)"
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
    console.print(table)
    console.print(
        f"{result.candidates} candidates × {result.windows} windows ({result.tokens:,} tokens each); "
        f"{result.measured} candidate-windows measured in {result.seconds:.1f} s, {result.reused} were there already. "
        f"Noise floor of the measuring: KL {noise:.1e}."
    )
    if result.settled is not None:
        console.print(f"The ranking is {result.settled}, after {result.tokens:,} tokens.")
    console.print(f"Next: kl-lens plan --run {folder}")
