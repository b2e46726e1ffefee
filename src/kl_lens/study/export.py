"""`export`: a plan as files that a runtime loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.base.errors import FormatError, PlanError
from kl_lens.base.units import human_bytes, parse_names
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel, load_tokenizer, model_folder
from kl_lens.run.folder import ALL_PLANS, Run, named_plans
from kl_lens.run.records import Artifact, Plan
from kl_lens.run.subjects import artifact_digest, plan_digest
from kl_lens.study.calibrate import for_streaming
from kl_lens.study.events import Events
from kl_lens.study.settings import (
    MEMORY,
    SIZE,
    Kind,
    Loading,
    Option,
    WithLlamaCpp,
    command_of,
    new_run_folder,
    number,
    option,
)
from kl_lens.study.workbench import WEIGHTS, Workbench
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
            kind = _KINDS[each.kind]
            switch = each.kind == "switch"
            options.setdefault(
                each.flag,
                Option(
                    each.keyword,
                    each.flag,
                    kind,
                    None,
                    each.help,
                    kind.metavar,
                    name,
                    is_switch=switch,
                    bare=each.given if switch else None,
                    several=each.kind == "names",
                    within=within,
                ),
            )
    return list(options.values())


@dataclass(frozen=True, kw_only=True)
class ExportSettings(WithLlamaCpp, Loading):
    verb: ClassVar[str] = "export"

    model: str | None = option(
        None,
        "the model to export with --format, without a run",
        positional=True,
        nargs="?",
        metavar="MODEL",
    )
    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
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

    @property
    def run_folder(self) -> Path:
        return Path(self.run or "runs/reference-mamba")

    def check(self) -> None:
        super().check()
        if self.format is None and self.run is None and self.model is not None:
            raise PlanError(
                "say what to export: --format FORMAT for a whole model, or --run DIR [--plan NAME] for plans"
            )
        if self.format:
            _named_model(self)
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
    def weights(self) -> str | None:
        """Where they must be; None: anywhere."""
        return None if describe_target(self.target).streams else MEMORY

    @property
    def target_options(self) -> dict[str, Any]:
        target = get_target(self.target)
        return {o.keyword: self.options[o.keyword] for o in target.options if o.keyword in self.options}


@dataclass(frozen=True)
class ExportResult:
    artifacts: list[tuple[Path, Artifact]]


def export(settings: ExportSettings, bench: Workbench, events: Events) -> ExportResult:
    if settings.format:
        if _learns(settings.format):
            return ExportResult([_model_with_statistics(settings, settings.format, bench, events)])
        return ExportResult([_plain_model(settings, settings.format, bench, events)])
    with Run.open(settings.run_folder) as run:
        return _plans_of(run, settings, bench, events)


def _learns(recipe: str) -> bool:
    try:
        return Recipe.parse(recipe).quantizer.learns
    except FormatError:  # the target checks it
        return False


def _named_model(settings: ExportSettings) -> str:
    if settings.model is None:
        raise PlanError(
            "--format exports a whole model: name it, as in: kl-lens export MODEL "
            f"--target {settings.target} --format {settings.format}"
        )
    return settings.model


def _model_with_statistics(
    settings: ExportSettings, recipe: str, bench: Workbench, events: Events
) -> tuple[Path, Artifact]:
    """One recipe for all weights, with the statistics of a run."""
    name = _named_model(settings)
    if settings.stream:
        folder = new_run_folder(settings.run, name)
        source = _streamed(settings, name)
        with Run.open(folder) as run:
            plan = get_target(settings.target).uniform_plan(source, recipe)
            return _written(run, settings, source, plan, events, settings.out)
    model = bench.model(settings)
    folder = new_run_folder(settings.run, model.name)
    model = bench.in_run(model, folder)
    learnt = model.weights.learnt_by([Recipe.parse(recipe)])
    with Run.create(folder) as run:
        run.identify(model_identity(model))
        run.note_command(["kl-lens", *command_of(settings)])
        plan = replace(_uniform(model, recipe), statistics=learnt)
        _quantize(model, plan, settings, events)
        return _written(run, settings, model, plan, events, settings.out)


def _plain_model(
    settings: ExportSettings, fmt: str, bench: Workbench, events: Events
) -> tuple[Path, Artifact]:
    source = _named_model(settings)
    extra = settings.target_options
    model: LoadedModel | Path
    target = get_target(settings.target)
    if target.streams:
        # Read one tensor at a time, so that a large model is never in memory.
        model = model_folder(source, revision=settings.revision)
        plan, name = target.uniform_plan(model, fmt), source
        if settings.tokenizer:
            extra["tokenizer"] = load_tokenizer(model, settings.tokenizer, settings.trust_remote_code)
    else:
        model = bench.model(settings)
        plan, name = _uniform(model, fmt), model.name
    folder = settings.out or new_run_folder(settings.run, name) / "artifacts" / settings.target / plan.name
    return folder, _export(model, plan, settings, folder, extra, events)


def _export(
    model: LoadedModel | Path,
    plan: Plan,
    settings: ExportSettings,
    folder: Path,
    extra: dict[str, Any],
    events: Events,
) -> Artifact:
    """Writes the files, and says so if they replace others of the same name."""
    earlier = earlier_artifact(folder)
    artifact = write_files(model, plan, settings.target, folder, **extra)
    if earlier is not None and artifact_digest(earlier) != artifact_digest(artifact):
        events.warn(
            f"{folder}: the files of an earlier export ({human_bytes(earlier.realised_bytes)}) were replaced"
        )
    return artifact


def _uniform(model: LoadedModel, name: str) -> Plan:
    assignment = {} if name in (FP16, "f16") else {c.name: name for c in model.anatomy.candidates}
    return Plan(name=f"uniform_{name.replace('+', '.')}", assignment=assignment, made_by="--format")


def _plans_of(run: Run, settings: ExportSettings, bench: Workbench, events: Events) -> ExportResult:
    components = run.table().components
    folder = run.folder / "plans"
    names = named_plans(settings.plan)
    if names is None:
        names = tuple(sorted(path.stem for path in folder.glob("*.json")))
        if not names:
            raise PlanError(
                f"{run.folder} has no plans; make some with: kl-lens plan --run {run.folder} --paper"
            )
    plans = [planning.read_plan(planning.plan_path(folder, name), components) for name in names]
    model = _source(run, settings, bench)
    run.note_command(["kl-lens", *command_of(settings)])
    made = []
    for plan in plans:
        if isinstance(model, LoadedModel):
            _quantize(model, plan, settings, events)
        events.note(f"exporting {plan.name} to {settings.target}")
        made.append(_written(run, settings, model, plan, events))
    return ExportResult(made)


def _source(run: Run, settings: ExportSettings, bench: Workbench) -> LoadedModel | Path:
    if not settings.stream:
        return bench.model_of(run, settings)
    return _streamed(settings, settings.model or run.identity["source"])


def _streamed(settings: ExportSettings, source: str) -> Path:
    return model_folder(source, revision=settings.revision)


def _quantize(model: LoadedModel, plan: Plan, settings: ExportSettings, events: Events) -> None:
    """Quantizes with methods that learn, showing progress; the store keeps the results for the export."""
    store = model.weights
    recipes = parsed(plan.assignment)
    if store.learnt_by(recipes.values(), plan.statistics) is None:
        return
    chosen = [(model.anatomy.component(name), recipe) for name, recipe in recipes.items()]
    target = get_target(settings.target)
    todo = [(c, r) for c, r in chosen if r.quantizer.learns and target.holds(r.grid, c.shape) is None]
    fits = all(target.holds(r.grid, c.shape) is None for c, r in chosen)
    allowed = not any(o.keyword == "fallback" and o.given for o in target.options)
    if not (fits or allowed or settings.options.get("fallback")):
        return  # the export will raise; do not spend minutes first
    with events.progress(f"quantizing {plan.name}") as shown:
        shown.started(sum(float(c.parameters * c.shape[-1]) for c, _ in todo), 0)
        for component, recipe in todo:
            store.digest(component.name, recipe)
            shown.advanced(float(component.parameters * component.shape[-1]), component.name)


def _written(
    run: Run,
    settings: ExportSettings,
    model: LoadedModel | Path,
    plan: Plan,
    events: Events,
    folder: Path | None = None,
) -> tuple[Path, Artifact]:
    folder = folder or (settings.out or run.folder / "artifacts" / settings.target) / plan.name
    extra = settings.target_options
    if isinstance(model, Path):
        fingerprint = run.identity.get("model_fingerprint")
        extra["fingerprint"] = fingerprint
        if settings.tokenizer:
            extra["tokenizer"] = load_tokenizer(model, settings.tokenizer, settings.trust_remote_code)
        if any(_learns(recipe) for recipe in plan.assignment.values()):
            extra["statistics"] = for_streaming(run, fingerprint)
        extra["weights_folder"] = run.folder / WEIGHTS
    artifact = _export(model, plan, settings, folder, extra, events)
    about = {
        "folder": str(folder.resolve()),
        "of_plan": plan_digest(
            plan.assignment, run.identity["model_fingerprint"], plan.statistics or run.statistics
        ),
    }
    run.store("artifact", f"{settings.target}/{plan.name}", artifact.to_json() | about)
    return folder, artifact
