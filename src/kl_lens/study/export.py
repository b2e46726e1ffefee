"""`export`: a plan as files that a runtime loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kl_lens import planning
from kl_lens.base.errors import FormatError, PlanError
from kl_lens.base.units import human_bytes
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run, named_plans
from kl_lens.run.records import EXPORT_OPTIONS, Artifact, ExportedTensor, Plan
from kl_lens.run.subjects import artifact_digest, plan_digest
from kl_lens.study import settings as of
from kl_lens.study.events import Events
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    ForTargets,
    Kind,
    Opening,
    Option,
    group,
    option,
    with_options,
)
from kl_lens.targets import (
    TARGETS,
    describe_target,
    earlier_artifact,
    export as write_files,
    get_target,
)
from kl_lens.targets.tokenizer import TOKENIZER_FILE
from kl_lens.weights.recipes import FP16, Recipe, parsed

_KINDS = {
    "switch": Kind(str),
    "text": Kind(str, metavar="NAME"),
    "number": of.number(1 << 16, 1),  # tokens of a forward without state
    "size": of.SIZE,
}


def _target_options(within: str) -> list[Option]:
    """The export options of all targets, each flag once."""
    options: dict[str, Option] = {}
    for name in TARGETS:
        for choice in describe_target(name).options:
            kind = _KINDS[choice.kind]
            switch = choice.kind == "switch"
            option = Option(
                choice.keyword,
                choice.flag,
                kind,
                None,
                choice.help,
                kind.metavar,
                name,
                is_switch=switch,
                bare=choice.given if switch else None,
                attribute=choice.keyword,
                within=within,
            )
            options.setdefault(choice.flag, option)
    return list(options.values())


@with_options
class ExportSettings(ForTargets):
    model: of.Model | None = option(
        None, "to export with --format, without a run", positional=True, nargs="?"
    )
    opening: Opening = group(Opening)
    run: of.Folder | None = of.of_new_run()
    target: of.Names = option(
        help="runtimes to write files for", choices=TARGETS, metavar="LIST"
    )
    plan: str = of.of_plans()
    format: str | None = option(
        None,
        "one format for all weights, instead of a plan, such as int8 or q4_k+imatrix (gptq and imatrix need a run with "
        "statistics: kl-lens calibrate)",
        metavar="FORMAT",
    )
    out: of.OutputFolder | None = option(
        None, "where to write (default: RUN/artifacts/TARGET)"
    )
    options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"spread": _target_options}
    )

    def parts(self) -> dict[str, Self]:
        """Of several targets each has a folder in --out."""
        parts = super().parts()
        if self.out is None or len(parts) == 1:
            return parts
        return {n: replace(part, out=self.out / n) for n, part in parts.items()}

    def check(self) -> None:
        super().check()
        if self.format is None and self.run is None and self.model is not None:
            raise PlanError(
                "say what to export: --format FORMAT, or --run DIR [--plan NAME] for plans"
            )
        if self.format and self.model is None:
            raise PlanError(
                "--format exports a whole model: name it, as in: kl-lens export MODEL --format q8_0"
            )
        target = describe_target(self.target[0])
        if self.opening.weights == of.DISK and not target.streams:
            raise PlanError(
                f"--weights disk does not work with --target {target.name}: it needs the whole model"
            )
        unknown = set(self.options) - {option.keyword for option in target.options}
        for choice in _target_options(""):
            if choice.name in unknown:
                raise PlanError(
                    f"{choice.flag} does not work with --target {target.name}"
                )


@dataclass(frozen=True)
class ExportedFile:
    folder: Path
    artifact: Artifact

    @property
    def lowered(self) -> list[ExportedTensor]:
        """Those that could not have the format of the plan."""
        return [
            tensor
            for tensor in self.artifact.tensors
            if tensor.reason and tensor.planned not in (FP16, tensor.realised)
        ]

    @property
    def besides_plan(self) -> dict[str, int]:
        """What the bytes are for that the file has more (or less) than the plan's weights."""
        artifact = self.artifact
        tensors = artifact.tensors
        stored = sum({tensor.runtime_name: tensor.bytes for tensor in tensors}.values())
        formats = sorted({t.realised for t in tensors if t.realised != t.planned})
        changed = (
            f"stored as {' or '.join(formats)} instead"
            if formats
            else "that it does without"
        )
        return {
            f"tensors {changed}": stored - artifact.planned_bytes,
            describe_target(artifact.target).besides: artifact.realised_bytes - stored,
        }

    @property
    def has_tokenizer(self) -> bool:
        named = self.artifact.settings.get("tokenizer", "none") != "none"
        return named or TOKENIZER_FILE in self.artifact.files


def export(settings: ExportSettings, session: Session) -> list[ExportedFile]:
    target = get_target(settings.target[0])
    name = settings.model or ""
    recipe = settings.format
    files = Files(target.name, session.events, dict(settings.options))
    opening = settings.opening
    if not target.streams:
        opening = replace(opening, weights=of.MEMORY)
    if recipe is None:
        with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
            model = session.model_of(run, settings.model, opening)
            names = named_plans(settings.plan)
            if names is None:
                names = tuple(
                    sorted(path.stem for path in (run.folder / "plans").glob("*.json"))
                )
            if not names:
                raise PlanError(
                    f"{run.folder} has no plans; make some with: kl-lens plan"
                )
            run.note_command(["kl-lens", *of.command_of(settings)])
            return files.of_plans(run, model, names, settings.out)
    model = session.model(name, opening)
    assignment = (
        {}
        if recipe in (FP16, "f16")
        else {c.name: recipe for c in model.anatomy.candidates}
    )
    plan = Plan(f"uniform_{recipe.replace('+', '.')}", assignment, "--format")
    folder = of.new_run_folder(settings.run, model.name)
    destination = settings.out or folder / "artifacts" / target.name / plan.name
    if not _learns(recipe):
        artifact = files.written(model, plan, destination)
        return [ExportedFile(destination, artifact)]
    model = session.in_run(model, folder)  # with the statistics of the run
    plan = replace(plan, statistics=model.weights.learnt_by([Recipe.parse(recipe)]))
    with Run.create(folder) as run:
        run.identify(model_identity(model))
        run.note_command(["kl-lens", *of.command_of(settings)])
        artifact = files.in_run(run, model, plan, destination)
    return [ExportedFile(destination, artifact)]


def _learns(recipe: str) -> bool:
    try:
        return Recipe.parse(recipe).quantizer.learns
    except FormatError:  # the target checks it
        return False


@dataclass(frozen=True)
class Files:
    """Writes files of one target."""

    target: str
    events: Events
    options: dict[str, Any] = field(default_factory=dict)  # of the target

    def of_plans(
        self, run: Run, model: LoadedModel, names: Sequence[str], out: Path | None = None
    ) -> list[ExportedFile]:
        """The files of a run's plans."""
        components = run.components
        paths = [planning.plan_path(run.folder / "plans", name) for name in names]
        exported = []
        for plan in [planning.read_plan(path, components) for path in paths]:
            self.events.note(f"exporting {plan.name} to {self.target}")
            destination = (out or run.folder / "artifacts" / self.target) / plan.name
            artifact = self.in_run(run, model, plan, destination)
            exported.append(ExportedFile(destination, artifact))
        return exported

    def in_run(self, run: Run, model: LoadedModel, plan: Plan, folder: Path) -> Artifact:
        """A file that the run records."""
        self._quantize(model, plan)
        artifact = self.written(model, plan, folder)
        digest = plan_digest(
            plan.assignment, model.fingerprint, plan.statistics or run.statistics
        )
        about = {"folder": str(folder.resolve()), "of_plan": digest}
        run.store("artifact", f"{self.target}/{plan.name}", artifact.to_json() | about)
        return artifact

    def written(self, model: LoadedModel, plan: Plan, folder: Path) -> Artifact:
        """A file, and a warning if it replaces another of the same name."""
        keywords = {option.keyword for option in get_target(self.target).options}
        wanted = plan.notes.get(EXPORT_OPTIONS, {}) | self.options
        options = {name: value for name, value in wanted.items() if name in keywords}
        earlier = earlier_artifact(folder)
        artifact = write_files(model, plan, self.target, folder, **options)
        if earlier is not None and artifact_digest(earlier) != artifact_digest(artifact):
            size = human_bytes(earlier.realised_bytes)
            self.events.warn(
                f"{folder}: the files of an earlier export ({size}) were replaced"
            )
        return artifact

    def _quantize(self, model: LoadedModel, plan: Plan) -> None:
        """Quantizes with methods that learn, showing progress; the store keeps the results for the export."""
        store = model.weights
        target = get_target(self.target)
        recipes = parsed(plan.assignment)
        if store.learnt_by(recipes.values(), plan.statistics) is None:
            return
        learning = [
            (model.anatomy.component(name), recipe)
            for name, recipe in recipes.items()
            if recipe.quantizer.learns
        ]
        todo = [(c, r) for c, r in learning if target.holds(r.grid, c.shape) is None]
        with self.events.progress(f"quantizing {plan.name}") as shown:
            shown.started(sum(float(c.parameters * c.shape[-1]) for c, _ in todo), 0)
            for component, recipe in todo:
                store.digest(component.name, recipe)
                shown.advanced(
                    float(component.parameters * component.shape[-1]), component.name
                )
