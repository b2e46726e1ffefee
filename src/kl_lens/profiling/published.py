"""The paper's timing protocol: the runtime's own benchmark program, latency hint, 60 seconds and 50 iterations.

Both must be reached. Its report says whether they were; if not, it runs again with higher limits.
"""

from __future__ import annotations

import csv
import io
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.base.files import write_text
from kl_lens.base.system import processors
from kl_lens.base.units import tag_of
from kl_lens.profiling.benchmark import Benchmark, Report, Timed, base_of
from kl_lens.profiling.machine import bound_of, limits_hold
from kl_lens.run.records import Profile, Quartiles, Subject
from kl_lens.run.subjects import current_profiles
from kl_lens.targets.openvino.target import AppReport, BenchmarkApp

PROTOCOL = "benchmark_app"
SECONDS = 60
QUICK_SECONDS = 3
ITERATIONS = 50
ATTEMPTS = 3
LIMIT_SECONDS = 3600  # per attempt: ends a compiler that hangs
LOG_FOLDER = Path("log/benchmark_log")


@dataclass(frozen=True)
class PublishedTiming:
    """The paper's protocol as a `Timing` of `kl_lens.profiling.Benchmark`."""

    tag: str = "kl-lens"  # part of the names of logs and the CSV

    def measure(
        self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report
    ) -> None:
        """Times artifacts whose target has such a program; logs and the CSV go to the run's folder."""
        device = benchmark.settings.runtime.device
        profiles: dict[str, Profile] = {}
        timed = [s for s in subjects if s.target.published is not None]
        benchmark.started(len(timed))
        for subject in timed:
            # Ratios are relative to earlier artifacts; FP16 comes first.
            earlier = [s for s in timed if s.name in profiles]
            base = base_of(subject, [*earlier, subject])
            before = profiles.get(base.name)
            try:
                profile = self._profile(
                    subject, base, before, benchmark, report.bandwidth
                )
                profiles[subject.name] = profile
                benchmark.store(profile)
            except (KLLensError, RuntimeError, OSError) as error:
                report.failed(subject, error)
            benchmark.advanced(f"{subject.name}, benchmark_app")
        if skipped := [s for s in subjects if s.target.published is None]:
            runtimes = " and ".join(dict.fromkeys(s.target.title for s in skipped))
            names = ", ".join(s.name for s in skipped)
            report.notes.append(
                f"{runtimes} has no benchmark_app: {names} not run with it"
            )
        report.profiles += profiles.values()
        # Earlier ones of the run with this tag and device, and the new ones.
        stored = current_profiles(benchmark.run) if benchmark.run else ()
        kind = (PROTOCOL, device, self.tag)
        rows = {
            p.subject.label: p
            for p in stored
            if (p.protocol, p.device, p.settings.get("tag")) == kind
        }
        if rows := rows | profiles:
            folder = _folder(benchmark)
            report.csv = write_report(folder, device, self.tag, [*rows.values()])

    def _log(self, subject: Timed, benchmark: Benchmark) -> Path:
        device = benchmark.settings.runtime.device
        name = f"{tag_of(_model_name(subject.subject))}_{device}_{self.tag}.log"
        return _folder(benchmark) / LOG_FOLDER / name

    def _profile(
        self,
        subject: Timed,
        base: Timed,
        earlier: Profile | None,
        benchmark: Benchmark,
        bandwidth: float,
    ) -> Profile:
        program = subject.target.published
        settings = benchmark.settings
        assert program is not None
        device = settings.runtime.device
        threads = settings.runtime.threads
        log = self._log(subject, benchmark)
        seconds = QUICK_SECONDS if settings.quick else SECONDS
        report, command = run_app(
            program, subject.path, log, seconds=seconds, device=device, threads=threads
        )
        # benchmark_app gives extremes, not quartiles; they are in the settings.
        latency = report.median_ms
        speed = report.throughput_fps
        timings = {
            "latency_ms": Quartiles(latency, latency, latency, report.iterations),
            "throughput_fps": Quartiles(speed, speed, speed, report.iterations),
        }
        before = earlier.timings if earlier else timings
        ratios = {
            "latency_ms": before["latency_ms"].median / latency,
            "throughput_fps": speed / before["throughput_fps"].median,
        }
        contents = subject.target.contents(subject.path) if limits_hold(device) else None
        bound = bound_of(contents, bandwidth, 0, speed) if contents else {}
        return Profile(
            subject=subject.subject,
            protocol=PROTOCOL,
            device=device,
            threads=report.threads or threads or processors(),
            timings=timings,
            ratios={
                name: Quartiles(value, value, value, 1) for name, value in ratios.items()
            },
            peak_memory_bytes=None,
            file_bytes=subject.file_bytes,
            bound=bound,
            settings={
                "tag": self.tag,
                "quick": settings.quick,
                "seconds": seconds,
                "iterations": ITERATIONS,
                **_reached(report),
                "data_shape": program.input_shapes(subject.path),
                "signature": subject.signature or "1 token, with state",
                "plugin_settings": f"{PROTOCOL}'s defaults, as published",
                "command": command,
                "log": str(log),
                "ratios_to": base.name,
                "ratios_to_fp16": base.is_fp16,
            },
            runtime={"library": subject.target.name, "device": device},
        )


def _reached(report: AppReport) -> dict[str, float]:
    return {
        "reached_seconds": report.duration_seconds,
        "reached_iterations": report.iterations,
        "average_ms": report.average_ms,
        "min_ms": report.min_ms,
        "max_ms": report.max_ms,
    }


def _folder(benchmark: Benchmark) -> Path:
    return benchmark.run.folder if benchmark.run else Path()


def run_app(
    program: BenchmarkApp,
    model: Path,
    log: Path,
    *,
    seconds: int = SECONDS,
    device: str = "CPU",
    threads: int | None = None,
) -> tuple[AppReport, list[str]]:
    """Runs until both limits are reached; the log keeps every attempt. Returns the report and its command."""
    texts = []
    for attempt in range(ATTEMPTS):
        command = program.command(
            model,
            seconds=seconds << attempt,
            iterations=ITERATIONS << attempt,
            device=device,
            threads=threads,
            beside=log.with_suffix(".json"),
        )
        code, text = _run(command)
        texts.append(f"$ {shlex.join(command)}\n{text}")
        write_text(log, "\n".join(texts))
        if code:
            raise TargetError(f"{PROTOCOL} failed: {program.complaint(text)}; see {log}")
        report = program.read(texts[-1])
        if report.duration_seconds >= seconds and report.iterations >= ITERATIONS:
            return report, command
    raise TargetError(
        f"{PROTOCOL} did not reach {seconds} s and {ITERATIONS} iterations in {ATTEMPTS} attempts; see {log}"
    )


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"{PROTOCOL} did not finish within {LIMIT_SECONDS // 60} minutes; the device's compiler may hang"
        ) from None
    return result.returncode, result.stdout


def _model_name(subject: Subject) -> str:
    """The plan; a file outside the run keeps its whole path, so that no two share a log."""
    if subject.plan is None or "path" in subject.settings:
        return subject.label
    return subject.plan


def write_report(
    folder: Path, device: str, tag: str, profiles: Sequence[Profile]
) -> Path:
    """`latency_throughput_{device}_{tag}_report.csv`, one row per model."""
    rows = [
        {
            "model": _model_name(profile.subject),
            "device": profile.device,
            "latency_median_ms": f"{profile.timings['latency_ms'].median:.6g}",
            "latency_average_ms": f"{profile.settings['average_ms']:.6g}",
            "latency_min_ms": f"{profile.settings['min_ms']:.6g}",
            "latency_max_ms": f"{profile.settings['max_ms']:.6g}",
            "throughput_fps": f"{profile.timings['throughput_fps'].median:.6g}",
            "iterations": profile.settings["reached_iterations"],
            "seconds": f"{profile.settings['reached_seconds']:.6g}",
            "size_bytes": profile.file_bytes,
            "quick": profile.settings["quick"],
        }
        for profile in profiles
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = folder / f"latency_throughput_{device}_{tag}_report.csv"
    write_text(path, text.getvalue())
    return path
