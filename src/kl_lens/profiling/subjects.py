"""What to benchmark: exported folders of a run, or given folders and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import ARTIFACT, Artifact, Profile, Subject
from kl_lens.run.subjects import artifact_digest, file_digest, outside_path
from kl_lens.targets import TARGETS, Target, exported_places, locate, target_of


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
    def signature(self) -> str:
        """What one call computes; only equal ones are compared."""
        if self.static_tokens is None:
            return "any tokens, with state"
        return f"{self.static_tokens} tokens{'' if self.with_head else ', no head'}"

    @property
    def with_head(self) -> bool:
        return self.artifact is None or bool(self.artifact.settings.get("with_head", True))


@dataclass(frozen=True)
class Failure:
    """An artifact that could not be benchmarked, and why."""

    subject: str
    reason: str


@dataclass
class Timings:
    """Profiles by subject, and what could not be measured."""

    profiles: dict[str, Profile] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


Known = Mapping[Path, tuple[str, str]]  # exports of a run: folder → (target, plan)


def read_timed(path: Path, known: Known | None = None) -> Timed:
    """Raises TargetError if the artifact is missing, damaged or of the wrong size."""
    place, artifact = locate(path)
    target = target_of(place)
    size = _checked_size(place, target, artifact)
    digest = file_digest(place) if artifact is None else artifact_digest(artifact)
    of_run = (known or {}).get(place.resolve())
    if of_run is not None:
        subject = Subject(ARTIFACT, of_run[1], of_run[0], digest=digest)
    else:  # outside the run
        plan = None if artifact is None else artifact.plan
        subject = Subject(ARTIFACT, plan, target.name, {"path": outside_path(place)}, digest)
    return Timed(subject, place, target, size, target.is_all_floating(place), artifact)


def _checked_size(place: Path, target: Target, artifact: Artifact | None) -> int:
    """Bytes that the runtime loads; raises if they differ from the record."""
    size = target.loaded_bytes(place)
    if artifact is not None and size != artifact.realised_bytes:
        raise TargetError(
            f"{place} has {size} bytes, but its record says {artifact.realised_bytes}; export it again"
        )
    return size


def run_places(run: Run, *, plans: str = ALL_PLANS, targets: Sequence[str] = tuple(TARGETS)) -> list[Path]:
    """The exported folders of a run."""
    places = exported_places(run)
    wanted = named_plans(plans)
    chosen = [
        place
        for (target, plan), place in places.items()
        if target in targets and (wanted is None or plan in wanted)
    ]
    if not chosen:
        raise TargetError(_nothing(run, plans, targets, sorted("/".join(key) for key in places)))
    return chosen


def _nothing(run: Run, plan: str, targets: Sequence[str], names: Sequence[str]) -> str:
    wanted = f"no plan {plan!r} for" if plan != ALL_PLANS else "nothing for"
    there = f"; it has {', '.join(names)}" if names else ""
    name = "" if plan == ALL_PLANS else f" --plan {plan}"
    return (
        f"{run.folder} has {wanted} {' or '.join(targets)}{there}; "
        f"export with: kl-lens export --run {run.folder} --target {targets[0]}{name}"
    )


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
