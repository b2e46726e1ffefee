"""`export`: a plan as files that a runtime loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel, load_tokenizer, resolve
from kl_lens.errors import PlanError
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import COUNT, HeldOut, Loading, command_of, grouped, new_run_folder, option
from kl_lens.pipeline.workbench import Workbench
from kl_lens.records import Artifact, Plan
from kl_lens.runs import ALL_PLANS, Run, named_plans
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.targets import TARGETS
from kl_lens.targets import export as write_files
from kl_lens.units import parse_names

_openvino, _gguf = grouped("openvino"), grouped("gguf")
Measured = dict[str, Any]  # KL and perplexity of a mapped plan, as planned and as exported


@dataclass(frozen=True, kw_only=True)
class ExportSettings(HeldOut, Loading):
    verb: ClassVar[str] = "export"

    model: str | None = option(
        None,
        "a model to export with --format, when there is no run",
        positional=True,
        nargs="?",
        metavar="MODEL",
    )
    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    target: str = option(choices=tuple(TARGETS))
    plan: str = option(ALL_PLANS, "plans of the run: a, or a,b, or all", metavar="NAMES")
    format: str | None = option(None, "one format for everything, instead of a plan", metavar="FORMAT")
    out: Path | None = option(None, "where to write (default: RUN/artifacts/TARGET)", metavar="DIR")
    device_profile: str = _openvino("cpu", "cpu, gpu, gpu-int4 or npu")
    rewrites: str | None = _openvino(
        None, "cumba, reduba, actiba, or none (default: what the profile asks for)", metavar="LIST"
    )
    static_tokens: int | None = _openvino(None, "a static forward without state", kind=COUNT)
    without_head: bool = _openvino(False, "end in the last hidden states (static only)")
    fallback: bool = _openvino(False, "lower what a profile cannot hold, visibly")
    stream: bool = _gguf(
        False,
        "read the run's checkpoint one tensor at a time, for large models; its weights are then not compared with "
        "the run's (--format always streams)",
    )
    map: bool = _gguf(
        False,
        "export int8 as q8_0 and int4 as q4_0; the numerics change, so the plan is measured again as llama.cpp "
        "computes it",
    )
    held_out: str = _gguf("wikitext2:valid", metavar="TEXT")
    held_out_windows: int = _gguf(8, kind=COUNT)

    @property
    def run_folder(self) -> Path:
        return Path(self.run or "runs/reference-mamba")

    @property
    def target_options(self) -> dict[str, Any]:
        if self.target == "gguf":
            from kl_lens.targets.gguf import DEFAULT_MAP

            return {"format_map": DEFAULT_MAP} if self.map else {}
        rewrites = None
        if self.rewrites is not None:
            rewrites = [name for name in parse_names(self.rewrites) if name != "none"]
        return {
            "device_profile": self.device_profile,
            "rewrites": rewrites,
            "static_tokens": self.static_tokens,
            "with_head": not self.without_head,
            "fallback": self.fallback,
        }


@dataclass(frozen=True)
class ExportResult:
    artifacts: list[tuple[Path, Artifact]]
    measured: dict[str, Measured] = field(default_factory=dict)  # by plan


def export(
    settings: ExportSettings, bench: Workbench | None = None, events: Events | None = None
) -> ExportResult:
    bench, events = bench or Workbench(), events or Events()
    if settings.format:
        return ExportResult([_whole_model(settings, bench)])
    if settings.run is None and settings.model is not None:
        raise PlanError(
            "say what to export: --format FORMAT for a whole model, or --run DIR [--plan NAME] for plans"
        )
    with Run.open(settings.run_folder) as run:
        return _plans_of(run, settings, bench, events)


def _whole_model(settings: ExportSettings, bench: Workbench) -> tuple[Path, Artifact]:
    if settings.model is None:
        raise PlanError(
            "--format exports a whole model: name it, as in: kl-lens export MODEL --target gguf --format q8_0"
        )
    extra = settings.target_options
    model: LoadedModel | Path
    if settings.target == "gguf":
        # Straight from the checkpoint's files, one tensor at a time: a large model is never in memory.
        from kl_lens.targets.gguf import uniform_plan

        model = resolve(settings.model, revision=settings.revision)
        plan, name = uniform_plan(model, settings.format), settings.model
        if settings.tokenizer:
            extra["tokenizer"] = load_tokenizer(model, settings.tokenizer, settings.trust_remote_code)
    else:
        model = bench.model(settings)
        plan, name = _uniform(model, settings.format), model.name
    folder = settings.out or new_run_folder(settings.run, name) / "artifacts" / settings.target / plan.name
    return folder, write_files(model, plan, settings.target, folder, **extra)


def _uniform(model: LoadedModel, name: str | None) -> Plan:
    assert name is not None
    assignment = {} if name in ("fp16", "f16") else {c.name: name for c in model.anatomy.candidates}
    return Plan(name=f"uniform_{name}", assignment=assignment, made_by="--format")


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
    meters = _meters(run, settings, model, bench, events)
    run.note_command(["kl-lens", *command_of(settings)])
    made = []
    for plan in plans:
        events.note(f"exporting {plan.name} to {settings.target}")
        made.append(_written(run, settings, model, plan))
    if meters is None:
        return ExportResult(made)
    artifacts = [artifact for _, artifact in made]
    return ExportResult(made, _measured(run, meters, plans, artifacts, events))


def _source(run: Run, settings: ExportSettings, bench: Workbench) -> LoadedModel | Path:
    if not settings.stream:
        return bench.model_of(run, settings)
    if settings.target != "gguf":
        raise PlanError("--stream is for --target gguf; OpenVINO's converter needs the whole model")
    return resolve(settings.model or run.identity["source"], revision=settings.revision)


def _written(
    run: Run, settings: ExportSettings, model: LoadedModel | Path, plan: Plan
) -> tuple[Path, Artifact]:
    folder = (settings.out or run.folder / "artifacts" / settings.target) / plan.name
    extra = settings.target_options
    if isinstance(model, Path):
        extra["fingerprint"] = run.identity["model_fingerprint"]
    artifact = write_files(model, plan, settings.target, folder, **extra)
    record = artifact.to_json() | {"folder": str(folder.resolve())}
    run.store("artifact", f"{settings.target}/{plan.name}", record)
    return folder, artifact


def _meters(
    run: Run, settings: ExportSettings, model: LoadedModel | Path, bench: Workbench, events: Events
) -> tuple[PlanMeter, PlanMeter] | None:
    """With --map the file holds other numbers than were measured: what measures the plan as made, and as llama.cpp
    computes it. Made before anything is written, so that unfit text is refused first."""
    if settings.target != "gguf" or not settings.map:
        return None
    if isinstance(model, Path):
        events.warn(
            "--stream does not open the model, so the mapped formats are not measured; "
            "kl-lens evaluate --divergence does that"
        )
        return None
    windows = bench.held_out(settings, run, model.require_tokenizer())
    return bench.meter(model, windows), bench.meter(model, windows, settings.target)


def _measured(
    run: Run,
    meters: tuple[PlanMeter, PlanMeter],
    plans: Sequence[Plan],
    artifacts: Sequence[Artifact],
    events: Events,
) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    as_planned, as_exported = meters
    windows = as_planned.text
    quantizable = {c.name for c in as_planned.model.anatomy.candidates}
    for plan, artifact in zip(plans, artifacts, strict=True):
        events.note(f"measuring {plan.name} as exported")
        realised = {t.component: t.realised for t in artifact.tensors if t.component in quantizable}
        results = {
            "planned": as_planned.measure(plan.assignment),
            "exported": as_exported.measure(realised),
        }
        measured: Measured = {"original_perplexity": results["planned"].original_perplexity}
        for name, result in results.items():
            measured[f"{name}_kl"] = result.kl.value
            measured[f"{name}_kl_standard_error"] = result.kl.standard_error
            measured[f"{name}_perplexity"] = result.perplexity.value
        measured["measured_on"] = f"{windows.label}, {len(windows)} windows"
        found[plan.name] = measured
        run.store("mapped", f"{artifact.target}/{plan.name}", measured)
    return found
