"""`kl-lens benchmark`: speed, memory and size of exported models, and how near they are to the machine's limit."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from kl_lens import profiling
from kl_lens.cli import options
from kl_lens.cli.progress import sweep_progress
from kl_lens.errors import TargetError
from kl_lens.records import Profile, Spread
from kl_lens.runs import Run
from kl_lens.targets import TARGETS
from kl_lens.units import human_bytes, human_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifacts",
        metavar="ARTIFACT",
        nargs="*",
        type=Path,
        help="exported folders or .gguf files (default: all that the run has)",
    )
    parser.add_argument("--run", metavar="DIR", help="the run folder; results are kept there")
    options.add_plans(parser)
    parser.add_argument(
        "--targets", default=",".join(TARGETS), metavar="LIST", help=f"default: {','.join(TARGETS)}"
    )
    parser.add_argument("--device", default="CPU", help="OpenVINO device: CPU, GPU, NPU (default: CPU)")
    parser.add_argument("--threads", type=options.positive, metavar="N", help="default: all processors")
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="llama.cpp: layers on a GPU")
    parser.add_argument(
        "--protocol",
        choices=tuple(profiling.PROTOCOLS),
        default="use",
        help="use: what a user feels (default); benchmark_app: the published one, 60 s for each IR",
    )
    parser.add_argument("--quick", action="store_true", help="short, to try things out; the record says so")
    parser.add_argument("--tag", metavar="TAG", help="part of the CSV's name (default: the model's name)")
    group = parser.add_argument_group("use")
    group.add_argument(
        "--prompt-lengths", default="32,128,512", metavar="LIST", help="tokens (default: 32,128,512)"
    )
    group.add_argument("--new-tokens", type=options.positive, default=64, metavar="N", help="default: 64")
    group.add_argument("--repeats", type=options.positive, default=5, metavar="N", help="default: 5")
    layers = parser.add_argument_group("latency table for `kl-lens plan --max-latency`")
    layers.add_argument("--layers", action="store_true", help="time components by shape and format")
    layers.add_argument("--formats", metavar="LIST", help="default: those that the run measured")
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        run = None
        if arguments.run or not arguments.artifacts:
            run = stack.enter_context(options.open_run(arguments))
        places = _places(arguments, run)
        progress = stack.enter_context(sweep_progress("benchmark"))
        benchmark = profiling.Benchmark(
            settings=_settings(arguments),
            protocol=arguments.protocol,
            tag=profiling.tag_of(arguments.tag or (run.identity.get("model", "model") if run else "model")),
            run=run,
            started=lambda total: progress.started(total, 0),
            advanced=lambda what: progress.advanced(1, what),
        )
        if run is not None:
            run.note_command(sys.argv)
        report = benchmark.measure(places, layers=arguments.layers, formats=_list(arguments.formats) or None)
    if arguments.json:
        options.print_json(_as_json(report))
    else:
        _print(report, run)
    for failure in report.failures:
        print(f"kl-lens benchmark: {failure.subject}: {failure.reason}", file=sys.stderr)
    return 1 if report.failures else 0


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _places(arguments: argparse.Namespace, run: Run | None) -> list[Path]:
    targets = _list(arguments.targets)
    if unknown := [name for name in targets if name not in TARGETS]:
        raise TargetError(f"--targets: no target is called {unknown[0]!r}; there are {', '.join(TARGETS)}")
    if arguments.artifacts:
        return list(arguments.artifacts)
    assert run is not None
    return profiling.run_places(run, plans=arguments.plan, targets=targets)


def _settings(arguments: argparse.Namespace) -> profiling.UseSettings:
    lengths = _list(arguments.prompt_lengths)
    if not lengths or not all(length.isdigit() and int(length) > 0 for length in lengths):
        raise TargetError(
            f"--prompt-lengths {arguments.prompt_lengths}: give numbers of tokens, as in 32,128,512"
        )
    settings = profiling.UseSettings(
        prompt_lengths=tuple(sorted({int(length) for length in lengths})),
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        device=arguments.device.upper(),
        threads=arguments.threads,
        gpu_layers=arguments.gpu_layers,
    )
    return profiling.quick(settings) if arguments.quick else settings


def _as_json(report: profiling.Report) -> dict[str, object]:
    return {
        "profiles": [p.to_json() | {"subject": p.subject.label} for p in report.profiles],
        "failures": {failure.subject: failure.reason for failure in report.failures},
        "notes": report.notes,
        "latency": {profile.name: profile.seconds for profile in report.latency},
        "latency_protocol": {profile.name: profile.protocol for profile in report.latency},
        "csv": None if report.csv is None else str(report.csv),
    }


def _print(report: profiling.Report, run: Run | None) -> None:
    console = options.console()
    used = [p for p in report.profiles if p.protocol == "use"]
    timed = [p for p in report.profiles if p.protocol == "benchmark_app"]
    if used:
        console.print(_use_table(used))
    if timed:
        console.print(_app_table(timed))
    for latency in report.latency:
        console.print(_latency_table(latency))
    for line in [*_remarks(report, used, timed), *report.notes]:
        console.print(line, soft_wrap=True)
    for latency in report.latency:
        console.print(
            f"{latency.name}: {latency.protocol['method']}; everything else: {latency.protocol['rest']}.",
            soft_wrap=True,
        )
        where = run.folder if run else "DIR"
        console.print(
            f"Next: kl-lens plan --run {where} --max-latency TIME --profile {latency.name}", soft_wrap=True
        )


def _spread(spread: Spread, scale: float, digits: int) -> str:
    low, median, high = (format(scale * v, f".{digits}f") for v in (spread.low, spread.median, spread.high))
    return f"{median} ({low}–{high})"


def _use_table(profiles: list[Profile]) -> Table:
    lengths = profiles[0].settings["prompt_lengths"]
    table = Table(title="In use: median (quartiles)", title_justify="left")
    table.add_column("artifact")
    for column in ("size", "load s", *(f"first token ms @{n}" for n in lengths), "ms/token", "tokens/s",
                   "× FP16", "peak memory", "of it model", "bound tokens/s", "share"):  # fmt: skip
        table.add_column(column, justify="right")
    for p in profiles:
        ratio = p.ratios["tokens_per_second"]
        table.add_row(
            p.subject.label,
            human_bytes(p.file_bytes),
            f"{p.timings['load_seconds'].median:.2f}",
            *(f"{1e3 * p.timings[f'first_token_seconds@{n}'].median:.1f}" for n in lengths),
            _spread(p.timings["seconds_per_token"], 1e3, 2),
            f"{p.timings['tokens_per_second'].median:.1f}",
            _spread(ratio, 1, 2) + ("" if p.settings["ratios_to_fp16"] else " *"),
            human_bytes(p.peak_memory_bytes or 0),
            human_bytes(p.settings["memory"]["model_bytes"]),
            f"{p.bound['tokens_per_second']:.0f}",
            f"{p.bound['share']:.2f}",
        )
    return table


def _app_table(profiles: list[Profile]) -> Table:
    table = Table(title="benchmark_app, the published protocol", title_justify="left")
    table.add_column("artifact")
    table.add_column("one inference")
    for column in ("size", "median ms", "average ms", "min ms", "max ms", "inferences/s", "× FP16",
                   "iterations", "seconds", "share of bound"):  # fmt: skip
        table.add_column(column, justify="right")
    for p in profiles:
        s = p.settings
        table.add_row(
            p.subject.label,
            s["signature"],
            human_bytes(p.file_bytes),
            f"{p.timings['latency_ms'].median:.2f}",
            f"{s['average_ms']:.2f}",
            f"{s['min_ms']:.2f}",
            f"{s['max_ms']:.2f}",
            f"{p.timings['throughput_fps'].median:.1f}",
            f"{p.ratios['latency_ms'].median:.2f}" + ("" if s["ratios_to_fp16"] else " *"),
            f"{s['reached_iterations']}",
            f"{s['reached_seconds']:.1f}",
            f"{p.bound['share']:.2f}",
        )
    return table


def _latency_table(latency: profiling.LatencyProfile) -> Table:
    table = Table(title=f"Latency table {latency.name}", title_justify="left")
    table.add_column("artifact")
    for column in ("predicted per token", "measured", "predicted / measured"):
        table.add_column(column, justify="right")
    for check in latency.checks:
        table.add_row(
            check["subject"],
            human_seconds(check["predicted"]),
            human_seconds(check["measured"]),
            f"{check['predicted'] / check['measured']:.2f}",
        )
    return table


def _remarks(report: profiling.Report, used: list[Profile], timed: list[Profile]) -> list[str]:
    machine = report.machine
    cache = machine.last_level_cache
    lines = [
        f"Machine, measured just before: reads {machine.bandwidth.best / 1e9:.1f} GB/s with "
        f"{machine.bandwidth.threads} thread(s) (median {machine.bandwidth.median / 1e9:.1f}), multiplies "
        f"{machine.matmul_rate / 1e9:.0f} GFLOP/s in float32"
        + (f", last-level cache {human_bytes(cache)}." if cache else ".")
    ]
    if slower := machine.bandwidth_at_threads:
        lines.append(
            f"With {slower.threads} thread(s) it reads {slower.best / 1e9:.1f} GB/s; shares are of all threads."
        )
    if any(p.bound.get("fits_in_cache") for p in report.profiles):
        lines.append(
            "Some models fit into the last-level cache, so their weights need not come from memory: their share of "
            "the bound may exceed 1 and says little."
        )
    if not_fp16 := sorted(
        {p.settings["ratios_to"] for p in used + timed if not p.settings["ratios_to_fp16"]}
    ):
        lines.append(f"* no FP16 artifact was there: ratios are to {', '.join(not_fp16)}.")
    if used:
        first = used[0]
        base = human_bytes(first.settings["memory"]["base_bytes"])
        lines.append(
            f"Text was generated after {first.settings['generated_after']} tokens, {first.settings['new_tokens']} at a "
            f"time; {first.settings['repeats']} round(s); {first.settings['interleaving']}. Peak memory is that of a "
            f"fresh process; interpreter and libraries take {base} of it before the model is loaded."
        )
    if any(p.settings["quick"] for p in report.profiles):
        lines.append("--quick: too short to publish, and the records say so.")
    if report.csv is not None:
        lines.append(f"Written: {report.csv}; logs in {report.csv.parent / 'log/benchmark_log'}.")
    return lines
