"""`kl-lens benchmark` without the printing: what is timed, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kl_lens.base.errors import KLLensError, TargetError, last_line
from kl_lens.profiling.machine import read_bandwidth
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
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
    def generates(self) -> bool:
        """Whether it writes text: not with a static shape, or without a head."""
        return self.artifact is None or not self.artifact.settings.get("static_tokens")


@dataclass
class Report:
    """The results of one benchmark."""

    bandwidth: float = 0.0  # bytes per second that this machine reads from memory
    profiles: list[Profile] = field(default_factory=list)
    # Artifact → why it could not be benchmarked.
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def failed(self, subject: Timed, error: Exception, during: str) -> None:
        """The last line of an error, with the artifact's path in it."""
        reason = last_line(error)
        if str(subject.path) not in reason:
            reason = f"{subject.path}: {reason}"
        self.failures[subject.name] = f"{reason} (while {during})"


def opened(
    paths: Sequence[Path], run: Run | None, runtime: SessionSettings
) -> tuple[list[Timed], Report]:
    """The artifacts that can be timed, those in FP16 first in each target, and a report that lists the others. Raises
    TargetError if there is none."""
    exports = exported_places(run).items() if run else ()
    order = list(TARGETS)
    exported = {folder.resolve(): key for key, folder in exports}
    report = Report()
    usable = list[Timed]()
    for path in paths:
        try:
            subject = read_timed(path, exported)
        except KLLensError as error:
            name = "/".join(exported.get(path.resolve(), (str(path),)))
            report.failures[name] = str(error)
            continue
        try:
            subject.target.check_device(runtime)
        except TargetError as error:
            report.notes.append(f"{subject.name} left out: {error}")
        else:
            usable.append(subject)
    if not usable:  # measuring the machine takes seconds, so check first
        raise TargetError("; ".join([*report.failures.values(), *report.notes]))
    usable.sort(key=lambda s: (order.index(s.target.name), not s.is_fp16))
    report.bandwidth = read_bandwidth()
    return usable, report


def base_of(subject: Timed, subjects: Sequence[Timed]) -> Timed:
    """The base of ratios: the FP16 subject of the same target, else its first one."""
    similar = [s for s in subjects if s.target is subject.target]
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
