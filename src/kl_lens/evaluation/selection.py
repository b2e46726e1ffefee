"""Chooses what to score: a run's plans and exported files, or files given by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kl_lens import planning
from kl_lens.base.errors import FormatError, KLLensError, PlanError, UnlearntError
from kl_lens.evaluation.judged import Judged, JudgedArtifact, JudgedModel
from kl_lens.model import ImageTask, LanguageTask, LoadedModel, Task
from kl_lens.model.files import read_config
from kl_lens.model.tasks import IMAGE
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import Plan, checked_plan_name
from kl_lens.run.subjects import is_current
from kl_lens.targets import SessionSettings, exported_places
from kl_lens.targets.tokenizer import artifact_tokenizer

TORCH = "torch"


@dataclass
class Selection:
    """The subjects to score, in order."""

    subjects: list[Judged] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # subject → why it cannot be scored
    notes: list[str] = field(default_factory=list)  # subjects left out on purpose

    def add_artifact(
        self,
        path: Path,
        settings: SessionSettings,
        model: LoadedModel | None,
        name: str | None = None,
        run: Run | None = None,
    ) -> None:
        """Adds an exported folder or file; `name` (`TARGET/PLAN`) if it belongs to the run."""
        try:
            judged = JudgedArtifact(path, settings, None if name is None else name.partition("/")[2])
            made = {} if judged.artifact is None else judged.artifact.settings
            if made.get("static_tokens") or not made.get("with_head", True):
                reason = "it has a static shape or no head, for benchmark_app"
                self.notes.append(f"{judged.label} is not evaluated: {reason}")
                return
            if model is not None:
                judged.counterpart(model)
        except UnlearntError as error:  # a file from outside the run: scored, but not compared
            self.notes.append(f"{path} is not compared with PyTorch: {error}")
        except (KLLensError, OSError) as error:
            self.failures[name or str(path)] = str(error)
            return
        if run is not None and not is_current(run, judged.subject):
            self.notes.append(
                f"{judged.label} was exported from an older version of its plan; export it again"
            )
        self.subjects.append(judged)


def given_subjects(
    paths: Sequence[Path], settings: SessionSettings, model: LoadedModel | None = None, run: Run | None = None
) -> Selection:
    """Files given by path."""
    selection = Selection()
    places = {} if run is None else {place.resolve(): key for key, place in exported_places(run).items()}
    for path in paths:
        key = places.get((path.parent if path.is_file() else path).resolve())
        name = None if key is None else "/".join(key)
        selection.add_artifact(path, settings, model, name, None if key is None else run)
    return selection


def run_subjects(
    run: Run,
    model: LoadedModel,
    settings: SessionSettings,
    *,
    plans: str = ALL_PLANS,
    targets: Sequence[str] | None = None,
) -> Selection:
    """A run's plans in PyTorch and its exported files.

    Args:
        plans: names of plans, separated by commas, or `all`.
        targets: `torch` for plans in PyTorch, and names of targets for files; default: all.
    """
    selection, wanted, known = Selection(), named_plans(plans), dict[str, Plan]()
    components = run.table().components
    for path in sorted((run.folder / "plans").glob("*.json")):
        try:
            known[checked_plan_name(path.stem)] = planning.read_plan(path, components)
        except KLLensError as error:
            selection.failures[f"{TORCH}/{path.stem}"] = str(error)
    for asked in wanted or ():
        if asked not in known:
            raise PlanError(
                selection.failures.get(f"{TORCH}/{asked}")
                or f"{run.folder} has no plan {asked!r}; it has {', '.join(sorted(known)) or 'none'}"
            )
    chosen = {name: known[name] for name in (known if wanted is None else wanted)}
    if targets is None or TORCH in targets:
        for name, plan in chosen.items():
            try:
                judged = JudgedModel.of_plan(model, name, plan.assignment, plan.statistics)
                selection.subjects.append(judged)
            except FormatError as error:  # made with other statistics than the run has now
                selection.failures[f"{TORCH}/{name}"] = str(error)
    for (target, made_from), place in exported_places(run).items():
        if (targets is None or target in targets) and (wanted is None or made_from in wanted):
            selection.add_artifact(place, settings, model, f"{target}/{made_from}", run)
    return selection


def artifact_task(judged: JudgedArtifact, tokenizer: str | None = None, images: str | None = None) -> Task:
    """The task of a file without its model; the record says text or images."""
    settings = {} if judged.artifact is None else judged.artifact.settings
    if settings.get("task") == IMAGE:
        return ImageTask.of(judged.path, read_config(judged.path), images)
    return LanguageTask(artifact_tokenizer(judged.path, judged.open, tokenizer), judged.label)
