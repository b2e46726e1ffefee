"""`export`: a plan as files that a runtime loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.base.errors import FormatError, PlanError, RunError, UnlearntError
from kl_lens.base.units import human_bytes, parse_names
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel, load_tokenizer, model_folder
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import Artifact, Plan
from kl_lens.run.subjects import artifact_digest, plan_digest
from kl_lens.study.session import QUANTIZED, Session
from kl_lens.study.settings import (
    DEFAULT_RUN,
    MEMORY,
    SIZE,
    Kind,
    Opening,
    Option,
    Settings,
    command_of,
    group,
    new_run_folder,
    number,
    of_run,
    option,
)
from kl_lens.targets import TARGETS, describe_target, earlier_artifact, export as write_files, get_target
from kl_lens.weights.recipes import FP16, Recipe, parsed

_KINDS = {
    "switch": Kind(str),
    "text": Kind(str, metavar="NAME"),
    "number": number(1 << 16, 1),  # tokens of a forward without state
    "size": SIZE,
    "names": Kind(
        lambda text: tuple(name for name in parse_names(text) if name != "none"),
        lambda names: ",".join(names) or "none",
        "LIST",
    ),
}


def _target_options(within: str) -> list[Option]:
    """The export options of all targets, each flag once."""
    options: dict[str, Option] = {}
    for name in TARGETS:
        for each in describe_target(name).options:
            kind, switch = _KINDS[each.kind], each.kind == "switch"
            option = Option(
                each.keyword, each.flag, kind, None, each.help, kind.metavar, name,
                is_switch=switch, bare=each.given if switch else None, several=each.kind == "names",
                attribute=each.keyword, within=within,
            )  # fmt: skip
            options.setdefault(each.flag, option)
    return list(options.values())


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    verb: ClassVar[str] = "export"

    model: str | None = option(
        None,
        "the model to export with --format, without a run",
        positional=True,
        nargs="?",
        metavar="MODEL",
    )
    opening: Opening = group(Opening)
    run: str | None = of_run("runs/<model>")
    target: str = option(choices=TARGETS)
    plan: str = option(ALL_PLANS, "plans of the run: a, or a,b, or all", metavar="NAMES")
    format: str | None = option(
        None,
        "one format for all weights, instead of a plan; int4-g64+gptq also names the method; gptq and imatrix need "
        "a run with statistics (kl-lens calibrate)",
        metavar="FORMAT",
    )
    out: Path | None = option(None, "where to write (default: RUN/artifacts/TARGET)", metavar="DIR")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"spread": _target_options})
    stream: bool = option(
        False,
        "read the checkpoint one tensor at a time, for large models and targets that support it; the weights are then "
        "not compared with the run's (--format always streams if possible)",
    )

    def check(self) -> None:
        super().check()
        if self.format is None and self.run is None and self.model is not None:
            raise PlanError(
                "say what to export: --format FORMAT for a whole model, or --run DIR [--plan NAME] for plans"
            )
        if self.format and self.model is None:
            raise PlanError(
                "--format exports a whole model: name it, as in: kl-lens export MODEL "
                f"--target {self.target} --format {self.format}"
            )
        target = describe_target(self.target)
        if self.stream and not target.streams:
            raise PlanError(
                f"--stream does not work with --target {target.name}; {target.title} needs the whole model"
            )
        # `run` sets `fallback` for every target.
        unknown = set(self.options) - {each.keyword for each in target.options} - {"fallback"}
        for each in _target_options(""):
            if each.name in unknown:
                raise PlanError(f"{each.flag} does not work with --target {target.name}")

    @property
    def target_options(self) -> dict[str, Any]:
        target = get_target(self.target)
        return {o.keyword: self.options[o.keyword] for o in target.options if o.keyword in self.options}


@dataclass(frozen=True)
class ExportResult:
    artifacts: list[tuple[Path, Artifact]]


def export(settings: ExportSettings, session: Session) -> ExportResult:
    exporter = _Exporter(settings, session)
    if settings.format is None:
        with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
            return ExportResult(exporter.plans_of(run))
    if _learns(settings.format):
        return ExportResult([exporter.model_with_statistics(settings.format)])
    return ExportResult([exporter.plain_model(settings.format)])


def _learns(recipe: str) -> bool:
    try:
        return Recipe.parse(recipe).quantizer.learns
    except FormatError:  # the target checks it
        return False


def _uniform(model: LoadedModel, name: str) -> Plan:
    assignment = {} if name in (FP16, "f16") else {c.name: name for c in model.anatomy.candidates}
    return Plan(name=f"uniform_{name.replace('+', '.')}", assignment=assignment, made_by="--format")


class _Exporter:
    def __init__(self, settings: ExportSettings, session: Session) -> None:
        self.settings, self.session, self.events = settings, session, session.events
        self.target = get_target(settings.target)
        self.weights = None if self.target.streams else MEMORY  # where they must be; None: anywhere

    def plans_of(self, run: Run) -> list[tuple[Path, Artifact]]:
        settings, folder = self.settings, run.folder / "plans"
        names = named_plans(settings.plan)
        if names is None:
            names = tuple(sorted(path.stem for path in folder.glob("*.json")))
            if not names:
                raise PlanError(
                    f"{run.folder} has no plans; make some with: kl-lens plan --run {run.folder} --paper"
                )
        components = run.table().components
        plans = [planning.read_plan(planning.plan_path(folder, name), components) for name in names]
        model: LoadedModel | Path
        if settings.stream:
            model = model_folder(settings.model or run.identity["source"])
        else:
            model = self.session.model_of(run, settings.model, settings.opening, weights=self.weights)
        run.note_command(["kl-lens", *command_of(settings)])
        made = []
        for plan in plans:
            if isinstance(model, LoadedModel):
                self._quantize(model, plan)
            self.events.note(f"exporting {plan.name} to {settings.target}")
            place = (settings.out or run.folder / "artifacts" / settings.target) / plan.name
            made.append(self._written(run, model, plan, place))
        return made

    def model_with_statistics(self, recipe: str) -> tuple[Path, Artifact]:
        """One recipe for all weights, with the statistics of a run."""
        settings, name = self.settings, self.settings.model or ""
        if settings.stream:
            source = model_folder(name)
            with Run.open(new_run_folder(settings.run, name)) as run:
                return self._written(run, source, self.target.uniform_plan(source, recipe), settings.out)
        model = self.session.model(name, settings.opening, weights=self.weights)
        folder = new_run_folder(settings.run, model.name)
        model = self.session.in_run(model, folder)
        learnt = model.weights.learnt_by([Recipe.parse(recipe)])
        with Run.create(folder) as run:
            run.identify(model_identity(model))
            run.note_command(["kl-lens", *command_of(settings)])
            plan = replace(_uniform(model, recipe), statistics=learnt)
            self._quantize(model, plan)
            return self._written(run, model, plan, settings.out)

    def plain_model(self, fmt: str) -> tuple[Path, Artifact]:
        settings, name = self.settings, self.settings.model or ""
        extra = settings.target_options
        model: LoadedModel | Path
        if self.target.streams:
            # Read one tensor at a time, so that a large model is never in memory.
            model = model_folder(name)
            plan = self.target.uniform_plan(model, fmt)
            extra |= self._tokenizer(model)
        else:
            model = self.session.model(name, settings.opening, weights=self.weights)
            plan, name = _uniform(model, fmt), model.name
        folder = (
            settings.out or new_run_folder(settings.run, name) / "artifacts" / settings.target / plan.name
        )
        return folder, self._export(model, plan, folder, extra)

    def _tokenizer(self, model: Path) -> dict[str, Any]:
        opening = self.settings.opening
        if opening.tokenizer is None:
            return {}
        return {"tokenizer": load_tokenizer(model, opening.tokenizer, opening.trust_remote_code)}

    def _quantize(self, model: LoadedModel, plan: Plan) -> None:
        """Quantizes with methods that learn, showing progress; the store keeps the results for the export."""
        store, target = model.weights, self.target
        recipes = parsed(plan.assignment)
        if store.learnt_by(recipes.values(), plan.statistics) is None:
            return
        chosen = [(model.anatomy.component(name), recipe) for name, recipe in recipes.items()]
        fits = [(c, r) for c, r in chosen if target.holds(r.grid, c.shape) is None]
        allowed = not any(o.keyword == "fallback" and o.given for o in target.options)
        if not (len(fits) == len(chosen) or allowed or self.settings.options.get("fallback")):
            return  # the export will raise; do not spend minutes first
        todo = [(c, r) for c, r in fits if r.quantizer.learns]
        with self.events.progress(f"quantizing {plan.name}") as shown:
            shown.started(sum(float(c.parameters * c.shape[-1]) for c, _ in todo), 0)
            for component, recipe in todo:
                store.digest(component.name, recipe)
                shown.advanced(float(component.parameters * component.shape[-1]), component.name)

    def _written(
        self, run: Run, model: LoadedModel | Path, plan: Plan, folder: Path | None
    ) -> tuple[Path, Artifact]:
        target = self.settings.target
        folder = folder or run.folder / "artifacts" / target / plan.name
        extra, fingerprint = self.settings.target_options, run.identity.get("model_fingerprint")
        if isinstance(model, Path):
            extra |= {"fingerprint": fingerprint, "weights_folder": run.folder / QUANTIZED}
            extra |= self._tokenizer(model)
            if any(_learns(recipe) for recipe in plan.assignment.values()):
                try:
                    extra["statistics"] = StoredStatistics.of_fingerprint(run.folder, fingerprint)
                except (RunError, UnlearntError) as error:
                    raise RunError(
                        f"--stream does not open the model, so it cannot gather statistics: {error}"
                    ) from error
        artifact = self._export(model, plan, folder, extra)
        digest = plan_digest(plan.assignment, fingerprint, plan.statistics or run.statistics)
        about = {"folder": str(folder.resolve()), "of_plan": digest}
        run.store("artifact", f"{target}/{plan.name}", artifact.to_json() | about)
        return folder, artifact

    def _export(self, model: LoadedModel | Path, plan: Plan, folder: Path, extra: dict[str, Any]) -> Artifact:
        """Writes the files, and says so if they replace others of the same name."""
        earlier = earlier_artifact(folder)
        artifact = write_files(model, plan, self.settings.target, folder, **extra)
        if earlier is not None and artifact_digest(earlier) != artifact_digest(artifact):
            self.events.warn(
                f"{folder}: the files of an earlier export ({human_bytes(earlier.realised_bytes)}) were replaced"
            )
        return artifact
