"""`kl-lens benchmark` without the printing: timing protocols and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kl_lens.base.errors import TargetError
from kl_lens.profiling.machine import read_bandwidth
from kl_lens.profiling.subjects import Failure, Timed, UseSettings, read_all
from kl_lens.run.folder import Run, provenance
from kl_lens.run.records import Profile


@dataclass
class Report:
    """The results of one benchmark."""

    bandwidth: float  # bytes per second that this machine reads from memory
    profiles: list[Profile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    csv: Path | None = None


class Timing(Protocol):
    """One way to time artifacts."""

    def steps(self, subjects: Sequence[Timed], settings: UseSettings) -> int:
        """How many times `advanced` will be called."""

    def measure(self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report) -> None:
        """Adds profiles, failures and notes to the report, and passes each profile to the benchmark's `store`."""


@dataclass
class Benchmark:
    """What to measure, and where the results go."""

    settings: UseSettings
    timings: Sequence[Timing]
    run: Run | None = None  # stores the profiles; None: not stored
    started: Callable[[int], None] = lambda total: None
    advanced: Callable[[str], None] = lambda what: None

    def measure(self, places: Sequence[Path]) -> Report:
        """Benchmarks artifacts; those that fail are listed in the report. Raises TargetError if all fail."""
        subjects, failures = read_all(places, self.run)
        usable, notes = list[Timed](), list[str]()
        for subject in subjects:
            try:
                subject.target.check_device(self.settings.runtime)
                usable.append(subject)
            except TargetError as error:
                notes.append(f"{subject.name} left out: {error}")
        if not usable:  # measuring the machine takes seconds, so check first
            raise TargetError("; ".join([*(failure.reason for failure in failures), *notes]))
        self.started(max(1, sum(timing.steps(usable, self.settings) for timing in self.timings)))
        report = Report(read_bandwidth(), failures=failures, notes=notes)
        for timing in self.timings:
            timing.measure(usable, self, report)
        return report

    def store(self, profile: Profile, partial: bool = False) -> None:
        if self.run is None:
            return
        settings = profile.settings
        parts = [profile.protocol, profile.device, *([settings["tag"]] if "tag" in settings else [])]
        name = "|".join([*parts, *(["quick"] if settings["quick"] else [])])
        # Stored under another name until the last round, so that it does not replace a finished one.
        if not partial:
            self.run.forget_result("profile", profile.subject, f"{name}|partial")
        value = profile.to_json() | {"provenance": provenance()}
        self.run.store_result("profile", profile.subject, name + partial * "|partial", value)
