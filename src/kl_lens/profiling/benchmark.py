"""`kl-lens benchmark` without the printing: what is timed, how, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kl_lens.base.errors import KLLensError, TargetError, last_line
from kl_lens.profiling.machine import read_bandwidth
from kl_lens.run.folder import ALL_PLANS, Run, named_plans, provenance
from kl_lens.run.records import Artifact, Profile, Subject
from kl_lens.run.subjects import artifact_subject
from kl_lens.targets import (
    TARGETS,
    SessionSettings,
    Target,
    exported_places,
    locate,
    target_of,
)


@dataclass(frozen=True)
class UseSettings:
    prompt_lengths: tuple[int, ...] = (32, 128, 512)
    new_tokens: int = 64
    repeats: int = 5  # timed rounds, at most
    runtime: SessionSettings = field(default_factory=SessionSettings)
    quick: bool = False  # too short to publish; marked in the record
    # With the ends of every speed's interval no further apart, it is enough.
    narrow: float | None = None

    @property
    def context(self) -> float:
        """Mean context of a generated token: text is generated after the longest prompt."""
        return max(self.prompt_lengths) + (self.new_tokens - 1) / 2


@dataclass(frozen=True)
class Timed:
    """One artifact, checked."""

    subject: Subject
    path: Path  # what a session opens
    target: Target
    file_bytes: int
    is_fp16: bool  # nothing is quantized: the base of ratios
    artifact: Artifact | None = None  # None for a bare file

    @property
    def name(self) -> str:
        return self.subject.label

    @property
    def signature(self) -> str:
        """What one call computes; only equal ones are compared. Empty for a file that generates text."""
        settings = {} if self.artifact is None else self.artifact.settings
        tokens = settings.get("static_tokens")
        head = "" if settings.get("with_head", True) else ", no head"
        return f"{tokens or 'any'} tokens{head}" if tokens or head else ""


@dataclass
class Report:
    """The results of one benchmark."""

    bandwidth: float  # bytes per second that this machine reads from memory
    profiles: list[Profile] = field(default_factory=list)
    # Artifact → why it could not be benchmarked.
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    csv: Path | None = None

    def failed(self, subject: Timed, error: Exception, during: str = "") -> None:
        """The last line of an error, with the artifact's path in it."""
        reason = last_line(error)
        if str(subject.path) not in reason:
            reason = f"{subject.path}: {reason}"
        self.failures[subject.name] = reason + (f" (while {during})" if during else "")


class Timing(Protocol):
    """One way to time artifacts."""

    def measure(
        self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report
    ) -> None:
        """Adds profiles, failures and notes to the report, passes each profile to the benchmark's `store`, and says to
        `started` how many times it will call `advanced`."""


@dataclass
class Benchmark:
    """What to measure, and where the results go."""

    settings: UseSettings
    timings: Sequence[Timing]
    run: Run | None = None  # stores the profiles; None: not stored
    started: Callable[[int], None] = lambda total: None
    advanced: Callable[[str], None] = lambda step: None

    def measure(self, paths: Sequence[Path]) -> Report:
        """Benchmarks artifacts; those that fail are listed in the report. Raises TargetError if all fail."""
        exports = exported_places(self.run).items() if self.run else ()
        order = list(TARGETS)
        exported = {folder.resolve(): key for key, folder in exports}
        usable = list[Timed]()
        failures = dict[str, str]()
        notes = list[str]()
        for path in paths:
            try:
                subject = read_timed(path, exported)
            except KLLensError as error:
                name = "/".join(exported.get(path.resolve(), (str(path),)))
                failures[name] = str(error)
                continue
            try:
                subject.target.check_device(self.settings.runtime)
                usable.append(subject)
            except TargetError as error:
                notes.append(f"{subject.name} left out: {error}")
        if not usable:  # measuring the machine takes seconds, so check first
            raise TargetError("; ".join([*failures.values(), *notes]))
        # FP16 first in each target.
        usable.sort(key=lambda s: (order.index(s.target.name), not s.is_fp16))
        report = Report(read_bandwidth(), failures=failures, notes=notes)
        for timing in self.timings:
            timing.measure(usable, self, report)
        return report

    def store(self, profile: Profile, partial: bool = False) -> None:
        if self.run is None:
            return
        quick = "quick" if profile.settings["quick"] else None
        tag = profile.settings.get("tag")
        name = "|".join(filter(None, [profile.protocol, profile.device, tag, quick]))
        # Stored under another name until the last round, so that it does not replace a finished one.
        unfinished = f"{name}|partial"
        if not partial:
            self.run.forget_result("profile", profile.subject, unfinished)
        value = profile.to_json() | {"provenance": provenance()}
        name = unfinished if partial else name
        self.run.store_result("profile", profile.subject, name, value)


def base_of(subject: Timed, subjects: Sequence[Timed]) -> Timed:
    """The base of ratios: the FP16 subject of the same target and signature, else the first one."""
    kind = (subject.target, subject.signature)
    similar = [s for s in subjects if (s.target, s.signature) == kind]
    return next((s for s in similar if s.is_fp16), similar[0])


def read_timed(
    path: Path, exported: Mapping[Path, tuple[str, str]] | None = None
) -> Timed:
    """Raises TargetError if the artifact is missing or damaged. `exported`: the run's folders → (target, plan)."""
    path, artifact = locate(path)
    target = target_of(path)
    plan = (exported or {}).get(path.resolve(), ("", None))[1]
    subject = artifact_subject(path, artifact, target.name, plan)
    size = target.loaded_bytes(path)
    return Timed(subject, path, target, size, target.is_all_floating(path), artifact)


def run_places(
    run: Run, *, plans: str = ALL_PLANS, targets: Sequence[str] = tuple(TARGETS)
) -> list[Path]:
    """The exported folders of a run."""
    folders = exported_places(run)
    names = named_plans(plans)
    chosen = [
        folder
        for (target, plan), folder in folders.items()
        if target in targets and (names is None or plan in names)
    ]
    if not chosen:
        lack = "nothing" if names is None else f"no plan {plans!r}"
        option = "" if names is None else f" --plan {plans}"
        present = ", ".join(sorted("/".join(key) for key in folders))
        raise TargetError(
            f"{run.folder} has {lack} for {' or '.join(targets)}{present and f'; it has {present}'}; "
            f"export with: kl-lens export --run {run.folder} --target {targets[0]}{option}"
        )
    return chosen
