"""What to benchmark, and how: exported folders of a run, or given folders and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import KLLensError, TargetError, last_line
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import ARTIFACT, Artifact, Subject
from kl_lens.run.subjects import artifact_digest, file_digest, outside_path
from kl_lens.targets import TARGETS, SessionSettings, Target, exported_places, locate, target_of


@dataclass(frozen=True)
class UseSettings:
    prompt_lengths: tuple[int, ...] = (32, 128, 512)
    new_tokens: int = 64
    repeats: int = 5
    device: str = "CPU"
    threads: int | None = None
    gpu_layers: int = 0
    load: str = "auto"
    quick: bool = False  # too short to publish; marked in the record

    @property
    def runtime(self) -> SessionSettings:
        return SessionSettings(self.device, self.threads, self.gpu_layers, load=self.load)

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
    def static_tokens(self) -> int | None:
        """Tokens of a model with fixed shape; None for a model that generates."""
        return None if self.artifact is None else self.artifact.settings.get("static_tokens")

    @property
    def with_head(self) -> bool:
        return self.artifact is None or bool(self.artifact.settings.get("with_head", True))

    @property
    def signature(self) -> str:
        """What one call computes; only equal ones are compared."""
        if self.static_tokens is None:
            return "any tokens, with state"
        return f"{self.static_tokens} tokens{'' if self.with_head else ', no head'}"


@dataclass(frozen=True)
class Failure:
    """An artifact that could not be benchmarked, and why."""

    subject: str
    reason: str


def failure_of(subject: Timed, error: Exception, during: str = "") -> Failure:
    """The last line of an error, with the artifact's path in it."""
    reason = last_line(error)
    if str(subject.path) not in reason:
        reason = f"{subject.path}: {reason}"
    return Failure(subject.name, reason + (f" (while {during})" if during else ""))


Known = Mapping[Path, tuple[str, str]]  # exports of a run: folder → (target, plan)


def read_timed(path: Path, known: Known | None = None) -> Timed:
    """Raises TargetError if the artifact is missing or damaged."""
    place, artifact = locate(path)
    target = target_of(place)
    digest = file_digest(place) if artifact is None else artifact_digest(artifact)
    if (of_run := (known or {}).get(place.resolve())) is not None:
        subject = Subject(ARTIFACT, of_run[1], of_run[0], digest=digest)
    else:  # outside the run
        plan = None if artifact is None else artifact.plan
        subject = Subject(ARTIFACT, plan, target.name, {"path": outside_path(place)}, digest)
    size = target.loaded_bytes(place)
    return Timed(subject, place, target, size, target.is_all_floating(place), artifact)


def run_places(run: Run, *, plans: str = ALL_PLANS, targets: Sequence[str] = tuple(TARGETS)) -> list[Path]:
    """The exported folders of a run."""
    places, wanted = exported_places(run), named_plans(plans)
    chosen = [
        place
        for (target, plan), place in places.items()
        if target in targets and (wanted is None or plan in wanted)
    ]
    if not chosen:
        what, name = ("nothing", "") if wanted is None else (f"no plan {plans!r}", f" --plan {plans}")
        there = f"; it has {', '.join(sorted('/'.join(key) for key in places))}" if places else ""
        raise TargetError(
            f"{run.folder} has {what} for {' or '.join(targets)}{there}; "
            f"export with: kl-lens export --run {run.folder} --target {targets[0]}{name}"
        )
    return chosen


def read_all(places: Iterable[Path], run: Run | None) -> tuple[list[Timed], list[Failure]]:
    """Readable artifacts, FP16 first within each target, and failures."""
    known = {} if run is None else {place.resolve(): key for key, place in exported_places(run).items()}
    subjects, failures = [], []
    for path in places:
        try:
            subjects.append(read_timed(path, known))
        except KLLensError as error:
            name = "/".join(known.get(path.resolve(), (str(path),)))
            failures.append(Failure(name, str(error)))
    order = list(TARGETS)
    subjects.sort(key=lambda s: (order.index(s.target.name), not s.is_fp16))
    return subjects, failures


def base_of(subject: Timed, subjects: Sequence[Timed]) -> Timed:
    """The base of ratios: the FP16 subject of the same target and signature, else the first one."""
    same = [s for s in subjects if s.target is subject.target and s.signature == subject.signature]
    return next((s for s in same if s.is_fp16), same[0])
