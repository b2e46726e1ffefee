"""`benchmark`: speed, memory and size of exported models, and how close they come to the machine's limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kl_lens import profiling
from kl_lens.base.errors import KLLensError
from kl_lens.base.units import parse_names
from kl_lens.paper.timing import PublishedTiming
from kl_lens.run.folder import ALL_PLANS, Run
from kl_lens.study.events import Events
from kl_lens.study.settings import (
    COUNT,
    LAYERS,
    LOAD_HELP,
    LOADS,
    NAMES,
    THREADS,
    TOKENS,
    Kind,
    OfRun,
    WithLlamaCpp,
    chosen_targets,
    command_of,
    grouped,
    option,
)

_use = grouped("use")


def _spell_list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _lengths(text: str) -> tuple[int, ...]:
    lengths = parse_names(text)
    if not lengths or not all(length.isdigit() and int(length) > 0 for length in lengths):
        raise KLLensError(f"{text}: give numbers of tokens, as in 32,128,512")
    return tuple(sorted({int(length) for length in lengths}))


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(WithLlamaCpp, OfRun):
    verb: ClassVar[str] = "benchmark"
    opens_models: ClassVar[bool] = False

    artifacts: tuple[Path, ...] = option(
        (),
        "exported folders or .gguf files (default: all of the run)",
        positional=True,
        nargs="*",
        metavar="ARTIFACT",
    )
    run: str | None = option(None, "the run folder; stores the results", metavar="DIR")
    plan: str = option(ALL_PLANS, "plans of the run: a, or a,b, or all", metavar="NAMES")
    targets: tuple[str, ...] | None = option(None, "default: all", kind=NAMES)
    device: str = option("CPU", "device: CPU, GPU or NPU (OpenVINO), CPU or GPU (MLX)")
    threads: int | None = option(None, "default: all processors", kind=THREADS)
    gpu_layers: int = option(0, "llama.cpp: layers on a GPU, or all", kind=LAYERS)
    load: str = option("auto", LOAD_HELP, choices=LOADS)
    protocol: str = option(
        "use",
        "use: loading, prompt and generation; benchmark_app: the paper's protocol, 60 s per IR",
        choices=("use", "benchmark_app", "both"),
    )
    quick: bool = option(False, "a short run to try things out; marked as such in the results")
    tag: str | None = option(None, "part of the CSV's name (default: the model's name)", metavar="TAG")
    prompt_lengths: tuple[int, ...] = _use(
        (32, 128, 512),
        "prompt lengths in tokens",
        kind=Kind(_lengths, _spell_list, type=int, least=1, most=TOKENS.most),
        metavar="LIST",
    )
    new_tokens: int = _use(64, "tokens to generate", kind=TOKENS)
    repeats: int = _use(5, "timed rounds", kind=COUNT)

    def check(self) -> None:
        super().check()
        chosen_targets(self.targets)

    @property
    def use(self) -> profiling.UseSettings:
        return profiling.UseSettings(
            self.prompt_lengths,
            min(self.new_tokens, 16) if self.quick else self.new_tokens,
            min(self.repeats, 2) if self.quick else self.repeats,
            self.device.upper(),
            self.threads,
            self.gpu_layers,
            self.load,
            self.quick,
        )


@dataclass(frozen=True)
class BenchmarkResult:
    report: profiling.Report
    folder: Path | None  # of the run

    @property
    def failures(self) -> dict[str, str]:
        return {failure.subject: failure.reason for failure in self.report.failures}

    @property
    def exit_code(self) -> int:
        return 1 if self.report.failures else 0


def _timings(settings: BenchmarkSettings, model: str) -> tuple[profiling.Timing, ...]:
    in_use, published = profiling.InUse(), PublishedTiming(profiling.tag_of(settings.tag or model))
    chosen: dict[str, tuple[profiling.Timing, ...]] = {
        "use": (in_use,), "benchmark_app": (published,), "both": (in_use, published)
    }  # fmt: skip
    return chosen[settings.protocol]


def benchmark(settings: BenchmarkSettings, events: Events) -> BenchmarkResult:
    targets = chosen_targets(settings.targets)
    with ExitStack() as stack:
        run = None
        if settings.run or not settings.artifacts:
            run = stack.enter_context(Run.open(settings.run_folder))
        places: Sequence[Path] = settings.artifacts
        if not places:
            assert run is not None
            places = profiling.run_places(run, plans=settings.plan, targets=targets)
        progress = stack.enter_context(events.progress("benchmark"))
        measuring = profiling.Benchmark(
            settings=settings.use,
            timings=_timings(settings, run.identity.get("model", "model") if run else "model"),
            run=run,
            started=lambda total: progress.started(total, 0),
            advanced=lambda what: progress.advanced(1, what),
        )
        if run is not None:
            run.note_command(["kl-lens", *command_of(settings)])
        report = measuring.measure(places)
        return BenchmarkResult(report, None if run is None else run.folder)
