"""Which subjects a command is about: a run's plans and exported files, or files given by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import KLLensError, PlanError
from kl_lens.evaluation.subjects import (
    ArtifactSubject,
    Subject,
    TorchSubject,
    planned_formats,
)
from kl_lens.runs import ALL_PLANS, Run, named_plans
from kl_lens.targets import TARGETS, RuntimeSettings, exported_places

TORCH = "torch"


@dataclass
class Selection:
    """Subjects in the order in which they are judged; each artifact behind its PyTorch counterpart."""

    subjects: list[Subject] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # what cannot be judged at all, and why
    notes: list[str] = field(default_factory=list)  # what is left out on purpose

    def add_artifact(
        self,
        path: Path,
        settings: RuntimeSettings,
        model: LoadedModel | None,
        name: str | None = None,
        plans: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        try:
            subject = ArtifactSubject(path, settings, name)
            reason = _no_session(subject)
            if reason is not None:
                self.notes.append(f"{subject.name} is not evaluated: {reason}")
                return
            plan = None if subject.artifact is None else (plans or {}).get(subject.artifact.plan)
            counterpart = None if model is None else subject.counterpart(model, plan)
        except (KLLensError, OSError) as error:
            self.failures[name or str(path)] = str(error)
            return
        if counterpart is not None and all(s.identity != counterpart.identity for s in self.subjects):
            self.subjects.append(counterpart)
        self.subjects.append(subject)


def given_subjects(
    paths: Sequence[Path], settings: RuntimeSettings, model: LoadedModel | None = None, run: Run | None = None
) -> Selection:
    """Files given by path, each with its PyTorch counterpart when the model is there."""
    selection = Selection()
    names = {} if run is None else {p.resolve(): "/".join(key) for key, p in exported_places(run).items()}
    plans = {} if run is None or model is None else _plans(run, Selection())
    for path in paths:
        place = path.parent if path.is_file() else path
        selection.add_artifact(path, settings, model, names.get(place.resolve()), plans)
    return selection


def run_subjects(
    run: Run,
    model: LoadedModel,
    settings: RuntimeSettings,
    *,
    plans: str = ALL_PLANS,
    targets: Sequence[str] = (TORCH, *TARGETS),
) -> Selection:
    """A run's plans in PyTorch and its exported files.

    Args:
        plans: names of plans, separated by commas, or `all`.
        targets: `torch` for plans in PyTorch, and names of targets for files. A file brings its PyTorch
            counterpart along, asked for or not: without it nobody knows whether the file is what was measured.
    """
    selection = Selection()
    known = _plans(run, selection)
    wanted = named_plans(plans)
    for plan in wanted or ():
        if plan not in known:
            raise PlanError(
                selection.failures.get(f"{TORCH}/{plan}")
                or f"{run.folder} has no plan {plan!r}; it has {', '.join(sorted(known)) or 'none'}"
            )
    chosen = {name: known[name] for name in (known if wanted is None else wanted)}
    if TORCH in targets:
        for name, assignment in chosen.items():
            selection.subjects.append(
                TorchSubject(model, f"{TORCH}/{name}", planned_formats(model, assignment))
            )
    for (target, made_from), place in exported_places(run).items():
        if target in targets and (wanted is None or made_from in wanted):
            selection.add_artifact(place, settings, model, f"{target}/{made_from}", known)
    return selection


def _plans(run: Run, selection: Selection) -> dict[str, dict[str, str]]:
    """The plans' assignments; one that cannot be read is a failure, and the others are there all the same."""
    components = run.table().components
    found = {}
    for path in sorted((run.folder / "plans").glob("*.json")):
        try:
            found[path.stem] = planning.read_plan(path, components).assignment
        except KLLensError as error:
            selection.failures[f"{TORCH}/{path.stem}"] = str(error)
    return found


def _no_session(subject: ArtifactSubject) -> str | None:
    settings = {} if subject.artifact is None else subject.artifact.settings
    if not settings.get("with_head", True):
        return "it was exported without its head, for benchmark_app"
    if settings.get("static_tokens"):
        return f"it is a static forward of {settings['static_tokens']} tokens, for benchmark_app"
    return None
