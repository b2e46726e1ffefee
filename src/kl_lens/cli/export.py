"""`kl-lens export`: a plan as files that a runtime loads."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel, load_tokenizer, resolve
from kl_lens.cli import options
from kl_lens.errors import PlanError
from kl_lens.records import Artifact, Plan
from kl_lens.runs import Run, named_plans
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.subjects import own_artifact, plan_digest
from kl_lens.targets import TARGETS, describe_target, export, get_target
from kl_lens.units import human_bytes

# How the kinds of a target's options are typed.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_true"},
    "text": {"metavar": "NAME"},
    "number": {"type": options.positive, "metavar": "N"},
    "names": {"metavar": "LIST"},
}
Measured = dict[str, Any]  # KL and perplexity of a mapped plan, as planned and as exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model to export with --format, when there is no run"
    )
    options.add_run(parser)
    options.add_loading(parser)
    parser.add_argument("--target", choices=tuple(TARGETS), required=True)
    options.add_plans(parser)
    parser.add_argument("--format", metavar="FORMAT", help="one format for everything, instead of a plan")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: RUN/artifacts/TARGET)"
    )
    flags: set[str] = set()
    for name in TARGETS:
        group = parser.add_argument_group(name)
        for option in describe_target(name).options:
            if option.flag not in flags:
                group.add_argument(option.flag, help=option.help, **_ARGUMENTS[option.kind])
            flags.add(option.flag)
    gguf = parser.add_argument_group("gguf")
    gguf.add_argument(
        "--stream",
        action="store_true",
        help="read the run's checkpoint one tensor at a time, for large models; its weights are then not compared with "
        "the run's (--format always streams)",
    )
    gguf.add_argument(
        "--map",
        action="store_true",
        help="export int8 as q8_0 and int4 as q4_0; the numerics change, so the plan is measured again as llama.cpp "
        "computes it",
    )
    options.add_held_out(gguf, windows=8)
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    measured: dict[str, Measured] = {}
    if arguments.format:
        artifacts = [_export_uniform(arguments)]
    else:
        artifacts, measured = _export_plans(arguments)
    if arguments.json:
        options.print_json(
            [
                artifact.to_json() | {"folder": str(folder), "measured": measured.get(artifact.plan)}
                for folder, artifact in artifacts
            ]
        )
    else:
        _print(artifacts, measured)
    return 0


def _target_options(arguments: argparse.Namespace) -> dict[str, Any]:
    target = get_target(arguments.target)
    found: dict[str, Any] = {}
    for option in target.options:
        typed = getattr(arguments, option.flag.removeprefix("--").replace("-", "_"))
        if option.kind == "names" and typed is not None:
            found[option.keyword] = [n.strip() for n in typed.split(",") if n.strip() not in ("", "none")]
        elif typed not in (None, False):
            found[option.keyword] = option.given if option.kind == "switch" else typed
    if arguments.map and target.translations:
        found["format_map"] = target.translations
    return found


def _export_uniform(arguments: argparse.Namespace) -> tuple[Path, Artifact]:
    if arguments.model is None:
        raise PlanError(
            "--format exports a whole model: name it, as in: kl-lens export MODEL --target gguf --format q8_0"
        )
    if get_target(arguments.target).streams:
        return _stream_uniform(arguments)
    model = options.load_model(arguments)
    name = arguments.format
    assignment = {} if name in ("fp16", "f16") else {c.name: name for c in model.anatomy.candidates}
    plan = Plan(name=f"uniform_{name}", assignment=assignment, made_by="--format")
    folder = (
        arguments.out
        or options.run_folder(arguments, model.name) / "artifacts" / arguments.target / plan.name
    )
    return folder, export(model, plan, arguments.target, folder, **_target_options(arguments))


def _stream_uniform(arguments: argparse.Namespace) -> tuple[Path, Artifact]:
    """Straight from the checkpoint's files, one tensor at a time: a large model is never in memory."""
    target = arguments.target
    source = resolve(arguments.model, revision=arguments.revision)
    plan = get_target(target).uniform_plan(source, arguments.format)
    folder = (
        arguments.out or options.run_folder(arguments, arguments.model) / "artifacts" / target / plan.name
    )
    extra = _target_options(arguments)
    if arguments.tokenizer:
        extra["tokenizer"] = load_tokenizer(source, arguments.tokenizer, arguments.trust_remote_code)
    return folder, export(source, plan, target, folder, **extra)


def _export_plans(
    arguments: argparse.Namespace,
) -> tuple[list[tuple[Path, Artifact]], dict[str, Measured]]:
    with _run(arguments) as run:
        table = run.table()
        folder = run.folder / "plans"
        names = named_plans(arguments.plan)
        if names is None:
            names = tuple(sorted(path.stem for path in folder.glob("*.json")))
            if not names:
                raise PlanError(
                    f"{run.folder} has no plans; make some with: kl-lens plan --run {run.folder} --paper"
                )
        plans = [planning.read_plan(planning.plan_path(folder, name), table.components) for name in names]
        model = _source(arguments, run)
        meters = _meters(arguments, run, model)
        run.note_command(sys.argv)
        made = []
        for plan in plans:
            print(f"exporting {plan.name} to {arguments.target}", file=sys.stderr, flush=True)
            made.append(_export_one(arguments, run, model, plan))
        artifacts = [artifact for _, artifact in made]
        return made, {} if meters is None else _measured(run, meters, plans, artifacts)


def _meters(
    arguments: argparse.Namespace, run: Run, model: LoadedModel | Path
) -> tuple[PlanMeter, PlanMeter] | None:
    """With --map the file holds other numbers than were measured: what measures the plan as made, and as the runtime
    computes it. Made before anything is written, so that unfit text is refused first."""
    target = get_target(arguments.target)
    if not arguments.map or not target.translations:
        return None
    if isinstance(model, Path):
        print(
            "kl-lens export: --stream does not open the model, so the mapped formats are not measured; "
            "kl-lens evaluate --divergence does that",
            file=sys.stderr,
        )
        return None
    windows = options.held_out_windows(arguments, run, model.require_tokenizer())
    return PlanMeter(model, windows), PlanMeter(model, windows, deployed=target)


def _measured(
    run: Run, meters: tuple[PlanMeter, PlanMeter], plans: list[Plan], artifacts: list[Artifact]
) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    as_planned, as_exported = meters
    windows, model = as_planned.text, as_planned.model
    for plan, artifact in zip(plans, artifacts, strict=True):
        print(f"measuring {plan.name} as exported", file=sys.stderr, flush=True)
        quantizable = {c.name for c in model.anatomy.candidates}
        realised = {t.component: t.realised for t in artifact.tensors if t.component in quantizable}
        results = {
            "planned": as_planned.measure(plan.assignment),
            "exported": as_exported.measure(realised),
        }
        found[plan.name] = {
            f"{name}_{key}": value
            for name, result in results.items()
            for key, value in (
                ("kl", result.kl.value),
                ("kl_standard_error", result.kl.standard_error),
                ("perplexity", result.perplexity.value),
            )
        } | {"original_perplexity": results["planned"].original_perplexity}
        found[plan.name]["measured_on"] = f"{options.text_name(windows)}, {len(windows)} windows"
        subject = own_artifact(plan.name, artifact.target, artifact)
        run.store_result("mapped", subject, found[plan.name]["measured_on"], found[plan.name])
    return found


def _source(arguments: argparse.Namespace, run: Run) -> LoadedModel | Path:
    if not arguments.stream:
        return options.load_run_model(arguments, run)
    target = get_target(arguments.target)
    if not target.streams:
        raise PlanError(f"--stream is not for --target {target.name}; {target.title} needs the whole model")
    return resolve(arguments.model or run.identity["source"], revision=arguments.revision)


def _export_one(
    arguments: argparse.Namespace, run: Run, model: LoadedModel | Path, plan: Plan
) -> tuple[Path, Artifact]:
    base = arguments.out or run.folder / "artifacts" / arguments.target
    folder = base / plan.name
    extra = _target_options(arguments)
    if isinstance(model, Path):
        extra["fingerprint"] = run.identity["model_fingerprint"]
    artifact = export(model, plan, arguments.target, folder, **extra)
    about = {
        "folder": str(folder.resolve()),
        "of_plan": plan_digest(plan.assignment, run.identity["model_fingerprint"]),
    }
    run.store("artifact", f"{arguments.target}/{plan.name}", artifact.to_json() | about)
    return folder, artifact


def _run(arguments: argparse.Namespace) -> Run:
    if arguments.run is None and arguments.model is not None:
        raise PlanError(
            "say what to export: --format FORMAT for a whole model, or --run DIR [--plan NAME] for plans"
        )
    return options.open_run(arguments)


def _print(artifacts: list[tuple[Path, Artifact]], measured: dict[str, Measured]) -> None:
    table = Table(title="Exported", title_justify="left")
    for column in ("plan", "target"):
        table.add_column(column)
    table.add_column("planned", justify="right")
    table.add_column("on disk", justify="right")
    if measured:
        for column in ("KL as planned", "KL as exported", "perplexity"):
            table.add_column(column, justify="right")
    table.add_column("not as planned")
    table.add_column("folder", overflow="fold")
    for folder, artifact in artifacts:
        fallbacks = [t for t in artifact.tensors if t.reason and t.planned not in ("fp16", t.realised)]
        table.add_row(
            artifact.plan,
            artifact.target,
            human_bytes(artifact.planned_bytes),
            human_bytes(artifact.realised_bytes),
            *_measured_cells(measured.get(artifact.plan)),
            ""
            if not fallbacks
            else f"{len(fallbacks)}, e.g. {fallbacks[0].component}: {fallbacks[0].reason}",
            str(folder),
        )
    console = options.console()
    console.print(table)
    if measured:
        first = next(iter(measured.values()))
        title = describe_target(artifacts[0][1].target).title
        console.print(
            f"KL as exported: the mapped formats with the activations that {title}'s kernels see, on "
            f"{first['measured_on']}; the original's perplexity there is {first['original_perplexity']:.3f}."
        )
    console.print(
        f'Next: kl-lens generate {shlex.quote(str(artifacts[0][0]))} --prompt "Once upon a time"',
        soft_wrap=True,
    )


def _measured_cells(measured: Measured | None) -> tuple[str, ...]:
    if measured is None:
        return ()
    return (
        f"{measured['planned_kl']:.2e} ± {measured['planned_kl_standard_error']:.0e}",
        f"{measured['exported_kl']:.2e} ± {measured['exported_kl_standard_error']:.0e}",
        f"{measured['exported_perplexity']:.3f}",
    )
