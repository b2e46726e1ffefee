"""`kl-lens benchmark` without the printing: timing protocols and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kl_lens.base.errors import TargetError
from kl_lens.profiling import in_use
from kl_lens.profiling.in_use import UseSettings
from kl_lens.profiling.machine import Machine, measure_machine
from kl_lens.profiling.subjects import Failure, Timed, Timings, read_all
from kl_lens.run.folder import Run, provenance
from kl_lens.run.records import Profile

QUICK_REPEATS, QUICK_TOKENS = 2, 16


@dataclass
class Report:
    """The results of one benchmark."""

    machine: Machine
    profiles: list[Profile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    csv: Path | None = None

    def add(self, outcome: Timings) -> None:
        self.profiles += outcome.profiles.values()
        self.failures += outcome.failures


class Timing(Protocol):
    """One way to time artifacts."""

    def steps(self, subjects: Sequence[Timed], settings: UseSettings) -> int:
        """How many times `advanced` will be called."""

    def measure(self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report) -> None:
        """Adds profiles, failures and notes to the report, and passes each profile to the benchmark's `store`."""


class InUse:
    """Times loading, the first token and text generation."""

    def steps(self, subjects: Sequence[Timed], settings: UseSettings) -> int:
        return in_use.steps_of(in_use.runnable(subjects), settings)

    def measure(self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report) -> None:
        runnable = in_use.runnable(subjects)
        report.notes += [
            f"{subject.name} cannot generate text (static shape or no head); time it with --protocol benchmark_app"
            for subject in subjects
            if subject not in runnable
        ]
        report.add(
            in_use.benchmark_use(
                runnable,
                benchmark.settings,
                report.machine,
                store=benchmark.store,
                advanced=benchmark.advanced,
            )
        )


@dataclass
class Benchmark:
    """What to measure, and where the results go.

    Example:
        >>> Benchmark(UseSettings(repeats=3)).measure([Path("out/mamba-4mb")]).profiles
    """

    settings: UseSettings = field(default_factory=UseSettings)
    timings: Sequence[Timing] = (InUse(),)
    run: Run | None = None  # stores the profiles; None: not stored
    started: Callable[[int], None] = lambda total: None
    advanced: Callable[[str], None] = lambda what: None

    def measure(self, places: Sequence[Path]) -> Report:
        """Benchmarks artifacts; those that fail are listed in the report. Raises TargetError if all fail."""
        subjects, failures = read_all(places, self.run)
        notes: list[str] = []
        usable = [s for s in subjects if self._has_place(s, notes)]
        if not usable:  # measuring the machine takes most of a minute, so check first
            raise TargetError("; ".join([*(failure.reason for failure in failures), *notes]))
        self.started(max(1, sum(timing.steps(usable, self.settings) for timing in self.timings)))
        report = Report(measure_machine(self.settings.threads), failures=failures, notes=notes)
        for timing in self.timings:
            timing.measure(usable, self, report)
        return report

    def _has_place(self, subject: Timed, notes: list[str]) -> bool:
        try:
            subject.target.check_device(self.settings.runtime)
        except TargetError as error:
            notes.append(f"{subject.name} left out: {error}")
            return False
        return True

    def store(self, profile: Profile, partial: bool = False) -> None:
        if self.run is not None:
            name = f"{profile.protocol}|{profile.device}"
            if "tag" in profile.settings:
                name += f"|{profile.settings['tag']}"
            if profile.settings.get("quick"):
                name += "|quick"
            # Stored under another name until the last round, so that it does not replace a finished one.
            if partial:
                name += "|partial"
            else:
                self.run.forget_result("profile", profile.subject, f"{name}|partial")
            value = profile.to_json() | {"provenance": provenance()}
            self.run.store_result("profile", profile.subject, name, value)


def quick(settings: UseSettings) -> UseSettings:
    """Shorter settings for trying things out; marked in the record."""
    return replace(
        settings,
        repeats=min(settings.repeats, QUICK_REPEATS),
        new_tokens=min(settings.new_tokens, QUICK_TOKENS),
        quick=True,
    )
