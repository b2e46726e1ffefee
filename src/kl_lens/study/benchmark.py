"""`benchmark`: speed, memory and size of exported models, and how close they come to the machine's limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from kl_lens.base.errors import KLLensError
from kl_lens.base.units import parse_names
from kl_lens.profiling.benchmark import InUse, Report as Report, UseSettings, run_places
from kl_lens.run.folder import Run
from kl_lens.study import settings as of
from kl_lens.study.session import Session
from kl_lens.study.settings import Kind, Runtime, Settings, group, option, with_options
from kl_lens.targets import TARGETS


def _lengths(text: str) -> tuple[int, ...]:
    lengths = parse_names(text)
    if not lengths or not all(length.isdigit() and int(length) > 0 for length in lengths):
        raise KLLensError(f"{text}: give numbers of tokens, as in 32,128,512")
    return tuple(sorted({int(length) for length in lengths}))


_LENGTHS = Kind(
    _lengths, lambda lengths: ",".join(map(str, lengths)), "LIST", int, 1, of.MOST_TOKENS
)


@with_options
class BenchmarkSettings(Settings):
    artifacts: tuple[Path, ...] = of.of_files()
    run: of.Folder | None = option(None, "the run folder; stores the results")
    plan: str = of.of_plans()
    target: of.Names | None = of.of_targets("runtimes (default: all)")
    runtime: Runtime = group(Runtime)
    quick: bool = option(
        False, "a short run to try things out; marked as such in the results"
    )
    prompt_lengths: Annotated[tuple[int, ...], _LENGTHS] = option(
        (32, 128, 512), "prompt lengths in tokens"
    )
    new_tokens: of.Tokens = option(64, "tokens to generate")
    repeats: of.Count = option(5, "timed rounds")


def benchmark(settings: BenchmarkSettings, session: Session) -> Report:
    with ExitStack() as stack:
        run = None
        if settings.run or not settings.artifacts:
            run = stack.enter_context(Run.open(Path(settings.run or of.DEFAULT_RUN)))
            run.note_command(["kl-lens", *of.command_of(settings)])
        folders: Sequence[Path] = settings.artifacts
        if run is not None and not folders:
            targets = settings.target or tuple(TARGETS)
            folders = run_places(run, plans=settings.plan, targets=targets)
        new_tokens = settings.new_tokens
        repeats = settings.repeats
        if settings.quick:
            new_tokens = min(new_tokens, 16)
            repeats = min(repeats, 2)
        runtime = settings.runtime.session()
        quick = settings.quick
        use = UseSettings(settings.prompt_lengths, new_tokens, repeats, runtime, quick)
        return time_files(folders, run, session, use)


def time_files(
    places: Sequence[Path], run: Run | None, session: Session, use: UseSettings
) -> Report:
    with session.events.progress("benchmark") as progress:
        return InUse(use, run, progress).measure(places)
