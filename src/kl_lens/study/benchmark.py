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
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    COUNT,
    DEFAULT_RUN,
    NAMES,
    TOKENS,
    Kind,
    Runtime,
    Settings,
    chosen_targets,
    command_of,
    group,
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
class BenchmarkSettings(Settings):
    verb: ClassVar[str] = "benchmark"

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
    runtime: Runtime = group(Runtime)
    protocol: str = option(
        "use",
        "use: loading, prompt and generation; benchmark_app: the paper's protocol, 60 s per IR",
        choices=("use", "benchmark_app", "both"),
    )
    quick: bool = option(False, "a short run to try things out; marked as such in the results")
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


@dataclass(frozen=True)
class BenchmarkResult:
    report: profiling.Report
    folder: Path | None  # of the run

    @property
    def failures(self) -> dict[str, str]:
        return self.report.failures

    @property
    def exit_code(self) -> int:
        return 1 if self.report.failures else 0


def benchmark(settings: BenchmarkSettings, session: Session) -> BenchmarkResult:
    use = profiling.UseSettings(
        settings.prompt_lengths,
        min(settings.new_tokens, 16) if settings.quick else settings.new_tokens,
        min(settings.repeats, 2) if settings.quick else settings.repeats,
        settings.runtime.session(),
        settings.quick,
    )
    with ExitStack() as stack:
        run = None
        if settings.run or not settings.artifacts:
            run = stack.enter_context(Run.open(Path(settings.run or DEFAULT_RUN)))
            run.note_command(["kl-lens", *command_of(settings)])
        places: Sequence[Path] = settings.artifacts
        if run is not None and not places:
            places = profiling.run_places(run, plans=settings.plan, targets=chosen_targets(settings.targets))
        progress = stack.enter_context(session.events.progress("benchmark"))
        model = run.identity.get("model", "model") if run else "model"
        published = PublishedTiming(profiling.tag_of(model))
        timings: dict[str, tuple[profiling.Timing, ...]] = {
            "use": (profiling.InUse(),),
            "benchmark_app": (published,),
            "both": (profiling.InUse(), published),
        }
        measuring = profiling.Benchmark(
            settings=use,
            timings=timings[settings.protocol],
            run=run,
            started=lambda total: progress.started(total, 0),
            advanced=lambda what: progress.advanced(1, what),
        )
        return BenchmarkResult(measuring.measure(places), None if run is None else run.folder)
