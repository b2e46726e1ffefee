"""`kl-lens benchmark` without the printing: timing protocols, records, the latency table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kl_lens.errors import TargetError
from kl_lens.profiling import in_use
from kl_lens.profiling.in_use import UseSettings
from kl_lens.profiling.machine import Machine, measure_machine
from kl_lens.profiling.subjects import Failure, Timed, Timings, read_all
from kl_lens.records import Profile, SensitivityTable
from kl_lens.runs import Run, provenance
from kl_lens.subjects import current_results
from kl_lens.targets.base import Target
from kl_lens.targets.latency import (
    KIND,
    PROTOCOL_KIND,
    LatencyProfile,
    LatencyRequest,
    TimedArtifact,
    other_conditions,
)

QUICK_REPEATS, QUICK_TOKENS = 2, 16


@dataclass
class Report:
    """The results of one benchmark."""

    machine: Machine
    profiles: list[Profile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    latency: list[LatencyProfile] = field(default_factory=list)
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

    def measure(
        self, places: Sequence[Path], *, layers: bool = False, formats: Sequence[str] | None = None
    ) -> Report:
        """Benchmarks artifacts; those that fail are listed in the report. Raises TargetError if all fail."""
        subjects, failures = read_all(places, self.run)
        notes: list[str] = []
        usable = [s for s in subjects if self._has_place(s, notes)]
        if not usable:  # measuring the machine takes most of a minute, so check first
            raise TargetError("; ".join([*(failure.reason for failure in failures), *notes]))
        if layers:
            self._tables(usable)  # raises now rather than after measuring
        self.started(self._steps(usable, layers, formats))
        report = Report(measure_machine(self.settings.threads), failures=failures, notes=notes)
        for timing in self.timings:
            timing.measure(usable, self, report)
        if layers:
            self._measure_layers(usable, report, formats)
        elif self.run is not None:
            self._check_tables(usable, report, self.run)
        return report

    def _has_place(self, subject: Timed, notes: list[str]) -> bool:
        try:
            subject.target.check_device(self.settings.runtime)
        except TargetError as error:
            notes.append(f"{subject.name} left out: {error}")
            return False
        return True

    def _steps(self, subjects: Sequence[Timed], layers: bool, formats: Sequence[str] | None) -> int:
        steps = sum(timing.steps(subjects, self.settings) for timing in self.timings)
        if layers:
            steps += sum(
                t.latency_steps(table, formats or table.formats) for t, table in self._tables(subjects)
            )
        return max(steps, 1)

    def _measure_layers(
        self, subjects: Sequence[Timed], report: Report, formats: Sequence[str] | None
    ) -> None:
        assert self.run is not None
        settings = self.settings
        measured = self._measured(subjects, report)
        for target, table in self._tables(subjects):
            request = LatencyRequest(
                table,
                formats or table.formats,
                measured[target.name],
                settings.runtime,
                settings.repeats,
                max(settings.prompt_lengths),
                report.machine.last_level_cache,
                self.advanced,
            )
            try:
                profile = target.latency(request)
            except TargetError as error:
                report.failures.append(Failure(f"{target.name}, --layers", str(error)))
                continue
            profile.protocol["conditions"] = target.conditions(settings.runtime)
            self.run.store(KIND, profile.name, profile.seconds)
            self.run.store(PROTOCOL_KIND, profile.name, profile.protocol | {"provenance": provenance()})
            report.latency.append(profile)

    def _check_tables(self, subjects: Sequence[Timed], report: Report, run: Run) -> None:
        """Compares the run's latency tables with the artifacts just timed."""
        known = run.load_all(KIND)
        timed = {p.subject.key for p in report.profiles if p.protocol == in_use.PROTOCOL}
        measured = self._measured([s for s in subjects if s.subject.key in timed], report)
        for target in {s.target.name: s.target for s in subjects if s.target.name in measured}.values():
            name = f"{target.name}-{target.device_label(self.settings.runtime)}"
            if name not in known:
                continue
            protocol = run.load(PROTOCOL_KIND, name) or {}
            here = target.conditions(self.settings.runtime)
            if other := other_conditions(protocol.get("conditions"), here):
                report.notes.append(f"Latency table {name} is not compared: it was measured with {other}.")
                continue
            profile = LatencyProfile(name, known[name], protocol)
            profile.check(measured[target.name])
            report.latency.append(profile)

    def _measured(self, subjects: Sequence[Timed], report: Report) -> dict[str, list[TimedArtifact]]:
        """Target → artifacts with their decode times, from this benchmark or an earlier one of the run."""
        assert self.run is not None
        known = {p.subject.key: p for p in report.profiles if p.protocol == in_use.PROTOCOL}
        for result in current_results(self.run, "profile"):
            profile = profile_from(result.value)
            same = profile.protocol == in_use.PROTOCOL and profile.device == self.settings.device
            if same and self.settings.threads in (None, profile.threads):
                known.setdefault(profile.subject.key, profile)
        timed: dict[str, list[TimedArtifact]] = {s.target.name: [] for s in subjects}
        for s in subjects:
            if s.artifact is not None and s.subject.key in known:
                profile = known[s.subject.key]
                seconds = profile.timings["seconds_per_token"].median
                timed[s.target.name].append(
                    TimedArtifact(s.name, s.path, s.artifact, seconds, profile.threads)
                )
        return timed

    def _tables(self, subjects: Sequence[Timed]) -> list[tuple[Target, SensitivityTable]]:
        """Target → its components and formats: as measured for it, or weights alone."""
        if self.run is None:
            raise TargetError("--layers times the components of a run; give --run DIR")
        targets = {s.target.name: s.target for s in subjects}.values()
        return [(target, self.run.table(target=target.name)) for target in targets]

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


def profile_from(record: dict[str, object]) -> Profile:
    """A stored profile, without its provenance."""
    return Profile.from_json({key: value for key, value in record.items() if key != "provenance"})


def quick(settings: UseSettings) -> UseSettings:
    """Shorter settings for trying things out; marked in the record."""
    return replace(
        settings,
        repeats=min(settings.repeats, QUICK_REPEATS),
        new_tokens=min(settings.new_tokens, QUICK_TOKENS),
        quick=True,
    )
