"""The published protocol: OpenVINO's own `benchmark_app`, latency hint, 60 seconds and 50 iterations.

Both limits have to be reached. benchmark_app goes on until they are; whether it did is read from its own report, and
if not it runs again with more. The plugin settings are its defaults, as published: this is not the fastest way to
run a quantized model (docs/targets.md), it is the comparable one.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens.errors import KLLensError, TargetError
from kl_lens.profiling.bound import decode_bound
from kl_lens.profiling.contents import read_contents
from kl_lens.profiling.machine import Machine, processors
from kl_lens.profiling.spread import ratio
from kl_lens.profiling.subjects import Failure, Outcome, Subject, base_of
from kl_lens.profiling.use import reason_of
from kl_lens.records import Profile, Spread
from kl_lens.writing import write_text

PROTOCOL = "benchmark_app"
SECONDS, QUICK_SECONDS, ITERATIONS = 60, 3, 50
ATTEMPTS = 3
LOG_FOLDER = Path("log/benchmark_log")
_LINE = r"\[ INFO \]\s+{name}:\s+([0-9.]+) (us|ms|s|iterations|FPS)\s*$"
_TO_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True)
class AppReport:
    """What benchmark_app printed at its end."""

    iterations: int
    duration_seconds: float
    median_ms: float
    average_ms: float
    min_ms: float
    max_ms: float
    throughput_fps: float
    threads: int | None = None  # that the plugin chose, where it says


def parse_log(text: str) -> AppReport:
    """Reads a log; latencies are milliseconds, or microseconds when the model is fast."""

    def find(name: str) -> tuple[float, str]:
        match = re.search(_LINE.format(name=name), text, re.MULTILINE)
        if match is None:
            raise TargetError(f"benchmark_app printed no {name!r}: {_complaint(text)}")
        return float(match[1]), match[2]

    def milliseconds(name: str) -> float:
        value, unit = find(name)
        return value * _TO_MILLISECONDS[unit]

    threads = re.search(r"INFERENCE_NUM_THREADS: (\d+)", text)
    return AppReport(
        iterations=int(find("Count")[0]),
        duration_seconds=milliseconds("Duration") / 1e3,
        median_ms=milliseconds("Median"),
        average_ms=milliseconds("Average"),
        min_ms=milliseconds("Min"),
        max_ms=milliseconds("Max"),
        throughput_fps=find("Throughput")[0],
        threads=int(threads[1]) if threads else None,
    )


def _complaint(text: str) -> str:
    """Its last line: where it fails, the innermost reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["it printed nothing"])[-1]


def reached(report: AppReport, seconds: float, iterations: int) -> bool:
    return report.duration_seconds >= seconds and report.iterations >= iterations


def app_command(
    model: Path,
    *,
    device: str = "CPU",
    seconds: int = SECONDS,
    iterations: int = ITERATIONS,
    data_shape: str | None = None,
    load_config: Path | None = None,
) -> list[str]:
    """The command, with the program of this very environment: another OpenVINO would be another benchmark."""
    beside = Path(sys.executable).parent / "benchmark_app"
    program = [str(beside)] if beside.is_file() else [sys.executable, "-m", "openvino.tools.benchmark.main"]
    command = [*program, "-m", str(model), "-d", device, "-hint", "latency"]
    command += ["-t", str(seconds), "-niter", str(iterations), "--inference_only", "TRUE"]
    if data_shape:
        command += ["-data_shape", data_shape]
    if load_config is not None:
        command += ["-load_config", str(load_config)]
    return command


def data_shape_of(model: Path) -> str | None:
    """Shapes for the dynamic inputs of an IR, one token each; None when all its shapes are fixed."""
    from kl_lens.targets.openvino.session import read_graph

    shapes = []
    for entry in read_graph(model).inputs:
        shape = entry.get_partial_shape()
        if shape.is_dynamic:
            sizes = ",".join(str(d.get_length()) if d.is_static else "1" for d in shape)
            shapes.append(f"{entry.get_any_name()}[{sizes}]")
    return ",".join(shapes) or None


def run_app(
    model: Path,
    log: Path,
    *,
    seconds: int = SECONDS,
    iterations: int = ITERATIONS,
    threads: int | None = None,
    run: Callable[[Sequence[str]], tuple[int, str]] | None = None,
    **options: Any,
) -> tuple[AppReport, list[str]]:
    """Runs until both limits are reached; the log keeps every attempt. Returns the report and the command it is of.

    A number of threads goes into a file: on its command line benchmark_app does not take one beside a hint.
    """
    run = run or _run
    if threads is not None:
        options["load_config"] = log.with_suffix(".json")
        write_text(options["load_config"], json.dumps({"CPU": {"INFERENCE_NUM_THREADS": threads}}))
    ask_seconds, ask_iterations, texts = seconds, iterations, []
    for _ in range(ATTEMPTS):
        command = app_command(model, seconds=ask_seconds, iterations=ask_iterations, **options)
        code, text = run(command)
        texts.append(f"$ {shlex.join(command)}\n{text}")
        write_text(log, "\n".join(texts))
        if code:
            raise TargetError(f"benchmark_app failed: {_complaint(text)}; see {log}")
        report = parse_log(texts[-1])
        if reached(report, seconds, iterations):
            return report, command
        ask_seconds, ask_iterations = 2 * ask_seconds, 2 * ask_iterations
    raise TargetError(
        f"benchmark_app did not reach {seconds} s and {iterations} iterations in {ATTEMPTS} attempts; see {log}"
    )


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def benchmark_with_app(
    subjects: Sequence[Subject],
    machine: Machine,
    folder: Path,
    *,
    tag: str,
    device: str = "CPU",
    threads: int | None = None,
    quick: bool = False,
    store: Callable[[Profile], object] = lambda profile: None,
    advanced: Callable[[str], None] = lambda what: None,
) -> Outcome:
    """Each IR in turn, in a process of its own; logs go to `folder`/log/benchmark_log."""
    results = Outcome()
    subjects = [s for s in subjects if s.target == "openvino"]
    for subject in subjects:
        try:
            # Ratios are to what was run already; FP16 comes first.
            base = base_of(subject, [s for s in subjects if s.name in results.profiles] + [subject])
            profile = _profile(subject, base, results, machine, folder, tag, device, threads, quick)
            results.profiles[subject.name] = profile
            store(profile)
        except (KLLensError, RuntimeError, OSError) as error:
            results.failures.append(Failure(subject.name, reason_of(subject, error)))
        advanced(f"{subject.name}, benchmark_app")
    return results


def _profile(
    subject: Subject,
    base: Subject,
    results: Outcome,
    machine: Machine,
    folder: Path,
    tag: str,
    device: str,
    threads: int | None,
    quick: bool,
) -> Profile:
    assert subject.artifact is not None
    model = subject.path / next(name for name in subject.artifact.files if name.endswith(".xml"))
    shape = data_shape_of(model)
    log = folder / LOG_FOLDER / f"{_file_name(subject.name)}_{device}_{tag}.log"
    seconds = QUICK_SECONDS if quick else SECONDS
    report, command = run_app(model, log, seconds=seconds, device=device, data_shape=shape, threads=threads)
    timings = {
        # benchmark_app gives the extremes, not the quartiles; they are in the settings.
        "latency_ms": Spread(report.median_ms, report.median_ms, report.median_ms, report.iterations),
        "throughput_fps": Spread(
            report.throughput_fps, report.throughput_fps, report.throughput_fps, report.iterations
        ),
    }
    base_timings = results.profiles[base.name].timings if base.name in results.profiles else timings
    values = {name: ratio(name, timings[name].median, base_timings[name].median) for name in timings}
    bound = decode_bound(
        read_contents(subject.path), machine, context=0, tokens_per_second=report.throughput_fps
    )
    return Profile(
        subject=subject.record,
        protocol=PROTOCOL,
        device=device,
        threads=report.threads or threads or processors(),
        timings=timings,
        ratios={name: Spread(value, value, value, 1) for name, value in values.items()},
        peak_memory_bytes=None,
        file_bytes=subject.file_bytes,
        bound=bound,
        settings={
            "tag": tag,
            "quick": quick,
            "seconds": seconds,
            "iterations": ITERATIONS,
            "reached_seconds": report.duration_seconds,
            "reached_iterations": report.iterations,
            "average_ms": report.average_ms,
            "min_ms": report.min_ms,
            "max_ms": report.max_ms,
            "data_shape": shape,
            "signature": "1 token, with state" if subject.static_tokens is None else subject.signature,
            "plugin_settings": "benchmark_app's defaults, as published",
            "command": command,
            "log": str(log),
            "ratios_to": base.name,
            "ratios_to_fp16": base.is_fp16,
        },
        runtime={"library": "openvino", "device": device},
    )


def _file_name(subject: str) -> str:
    """`openvino/p05` → `p05`, as published; what lies elsewhere keeps its whole path, or two could share a log."""
    plan = subject.removeprefix("openvino/")
    return re.sub(r"[^\w.-]+", "-", plan).strip("-")


def write_report(folder: Path, device: str, tag: str, profiles: Sequence[Profile]) -> Path:
    """`latency_throughput_{device}_{tag}_report.csv`, one row per model."""
    columns = ("model", "device", "latency_median_ms", "latency_average_ms", "latency_min_ms", "latency_max_ms",
               "throughput_fps", "iterations", "seconds", "size_bytes", "quick")  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for profile in profiles:
        settings = profile.settings
        writer.writerow(
            (
                profile.subject.label.removeprefix("openvino/"),
                profile.device,
                f"{profile.timings['latency_ms'].median:.6g}",
                f"{settings['average_ms']:.6g}",
                f"{settings['min_ms']:.6g}",
                f"{settings['max_ms']:.6g}",
                f"{profile.timings['throughput_fps'].median:.6g}",
                settings["reached_iterations"],
                f"{settings['reached_seconds']:.6g}",
                profile.file_bytes,
                settings["quick"],
            )
        )
    path = folder / f"latency_throughput_{device}_{tag}_report.csv"
    write_text(path, text.getvalue())
    return path
