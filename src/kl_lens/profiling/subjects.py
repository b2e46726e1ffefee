"""What is benchmarked: exported folders of a run, or folders and files that are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kl_lens import records
from kl_lens.errors import KLLensError, TargetError
from kl_lens.profiling.contents import all_floating, check_size
from kl_lens.records import Artifact, Profile
from kl_lens.runs import ALL_PLANS, Run, named_plans
from kl_lens.subjects import artifact_digest, file_digest, outside_path
from kl_lens.targets import TARGETS, read_artifact


@dataclass(frozen=True)
class Subject:
    """One artifact that is there and whole."""

    name: str  # "openvino/PLAN", "gguf/PLAN", or the path of a file from elsewhere
    path: Path  # what a session opens
    target: str
    plan: str
    file_bytes: int
    is_fp16: bool  # nothing in it is quantized: the base of ratios
    artifact: Artifact | None = None  # None for a bare .gguf file

    @property
    def record(self) -> records.Subject:
        """Who its profiles are about."""
        outside = {} if self.name == f"{self.target}/{self.plan}" else {"path": self.name}
        if self.artifact is not None:
            digest = artifact_digest(self.artifact)
        else:
            digest = file_digest(self.path) if self.path.is_file() else ""
        return records.Subject(records.ARTIFACT, self.plan, self.target, outside, digest)

    @property
    def static_tokens(self) -> int | None:
        """Tokens of a forward of fixed shape; None for a model that goes on token by token."""
        return None if self.artifact is None else self.artifact.settings.get("static_tokens")

    @property
    def signature(self) -> str:
        """What one call computes: only equal ones can be compared."""
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
class Outcome:
    """Profiles by subject, and what could not be measured."""

    profiles: dict[str, Profile] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def read_subject(path: Path, name: str | None = None) -> Subject:
    """Raises TargetError that names the artifact when it is missing, damaged or not the size it should have."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"{path}: no such file")
        return Subject(
            name or str(path), path, "gguf", path.stem, path.stat().st_size, all_floating(path), None
        )
    artifact = read_artifact(path)
    size = check_size(path, artifact)
    return Subject(
        name or f"{artifact.target}/{artifact.plan}",
        path,
        artifact.target,
        artifact.plan,
        size,
        all_floating(path),
        artifact,
    )


def run_places(
    run: Run, *, plans: str = ALL_PLANS, targets: Sequence[str] = tuple(TARGETS)
) -> dict[str, Path]:
    """Name → folder of what was exported for a run: by its journal, and by what lies in its folder."""
    places = _all_places(run, targets)
    wanted = named_plans(plans)
    chosen = {
        name: folder
        for name, folder in places.items()
        if name.partition("/")[0] in targets and (wanted is None or name.partition("/")[2] in wanted)
    }
    if not chosen:
        raise TargetError(_nothing(run, plans, targets, places))
    return chosen


def named_places(paths: Sequence[Path], run: Run | None) -> dict[str, Path]:
    """Artifacts that were named by their path; those of the run keep the name that they have there."""
    places = {} if run is None else _all_places(run, tuple(TARGETS))
    known = {place.resolve(): name for name, place in places.items()}
    return {known.get(path.resolve(), outside_path(path)): path for path in paths}


def _all_places(run: Run, targets: Sequence[str]) -> dict[str, Path]:
    places = {}
    for name in run.load_all("artifact"):
        places[name] = run.artifact_folder(name)
    for target in targets:
        for record_file in sorted((run.folder / "artifacts" / target).glob("*/artifact.json")):
            places.setdefault(f"{target}/{record_file.parent.name}", record_file.parent)
    return places


def _nothing(run: Run, plan: str, targets: Sequence[str], places: dict[str, Path]) -> str:
    wanted = f"no plan {plan!r} for" if plan != "all" else "nothing for"
    there = f"; exported are {', '.join(sorted(places))}" if places else ""
    name = "" if plan == "all" else f" --plan {plan}"
    return (
        f"{run.folder} has {wanted} {' or '.join(targets)}{there}; "
        f"export with: kl-lens export --run {run.folder} --target {targets[0]}{name}"
    )


def read_subjects(places: dict[str, Path]) -> tuple[list[Subject], list[Failure]]:
    """Those that are whole, FP16 first within each target, and those that are not."""
    subjects, failures = [], []
    for name, path in places.items():
        try:
            subjects.append(read_subject(path, name))
        except KLLensError as error:
            failures.append(Failure(name, str(error)))
    order = list(TARGETS)
    subjects.sort(key=lambda s: (order.index(s.target), not s.is_fp16))
    return subjects, failures


def base_of(subject: Subject, subjects: Sequence[Subject]) -> Subject:
    """What ratios are to: the FP16 subject of the same target and signature, or the first of those if none is FP16."""
    same = [s for s in subjects if s.target == subject.target and s.signature == subject.signature]
    return next((s for s in same if s.is_fp16), same[0])
