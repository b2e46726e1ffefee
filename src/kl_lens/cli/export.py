"""`kl-lens export`: a plan as files that a runtime loads."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel, resolve
from kl_lens.cli import options
from kl_lens.errors import PlanError
from kl_lens.records import Artifact, Plan
from kl_lens.runs import Run
from kl_lens.targets import TARGETS, export
from kl_lens.units import human_bytes

HELP = "write a plan as OpenVINO IR or GGUF, with the very integers that were measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model to export with --format, when there is no run"
    )
    options.add_run(parser)
    options.add_loading(parser)
    parser.add_argument("--target", choices=tuple(TARGETS), required=True)
    parser.add_argument("--plan", default="all", metavar="NAME", help="a plan of the run, or all (default)")
    parser.add_argument("--format", metavar="FORMAT", help="one format for everything, instead of a plan")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: RUN/artifacts/TARGET)"
    )
    openvino = parser.add_argument_group("openvino")
    openvino.add_argument("--device-profile", default="cpu", help="cpu, gpu, gpu-int4 or npu (default: cpu)")
    openvino.add_argument(
        "--rewrites",
        metavar="LIST",
        help="cumba, reduba, actiba, or none (default: what the profile asks for)",
    )
    openvino.add_argument(
        "--static-tokens", type=options.positive, metavar="N", help="a static forward without state"
    )
    openvino.add_argument(
        "--without-head", action="store_true", help="end in the last hidden states (static only)"
    )
    openvino.add_argument("--fallback", action="store_true", help="lower what a profile cannot hold, visibly")
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
        help="export int8 as q8_0 and int4 as q4_0; measure again: the numerics change",
    )
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.format:
        artifacts = [_export_uniform(arguments)]
    else:
        artifacts = _export_plans(arguments)
    if arguments.json:
        options.print_json([artifact.to_json() | {"folder": str(folder)} for folder, artifact in artifacts])
    else:
        _print(artifacts)
    return 0


def _target_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.target == "gguf":
        from kl_lens.targets.gguf import DEFAULT_MAP

        return {"format_map": DEFAULT_MAP} if arguments.map else {}
    rewrites = None
    if arguments.rewrites is not None:
        rewrites = [r.strip() for r in arguments.rewrites.split(",") if r.strip() and r.strip() != "none"]
    return {
        "device_profile": arguments.device_profile,
        "rewrites": rewrites,
        "static_tokens": arguments.static_tokens,
        "with_head": not arguments.without_head,
        "fallback": arguments.fallback,
    }


def _export_uniform(arguments: argparse.Namespace) -> tuple[Path, Artifact]:
    if arguments.model is None:
        raise PlanError(
            "--format exports a whole model: name it, as in: kl-lens export MODEL --target gguf --format q8_0"
        )
    if arguments.target == "gguf":
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
    from kl_lens.targets.gguf import uniform_plan

    source = resolve(arguments.model, revision=arguments.revision)
    plan = uniform_plan(source, arguments.format)
    folder = (
        arguments.out or options.run_folder(arguments, arguments.model) / "artifacts" / "gguf" / plan.name
    )
    return folder, export(source, plan, "gguf", folder, **_target_options(arguments))


def _export_plans(arguments: argparse.Namespace) -> list[tuple[Path, Artifact]]:
    with _run(arguments) as run:
        table = run.table()
        folder = run.folder / "plans"
        names = [arguments.plan]
        if arguments.plan == "all":
            names = sorted(path.stem for path in folder.glob("*.json"))
            if not names:
                raise PlanError(
                    f"{run.folder} has no plans; make some with: kl-lens plan --run {run.folder} --paper"
                )
        plans = [planning.read_plan(planning.plan_path(folder, name), table.components) for name in names]
        model = _source(arguments, run)
        run.note_command(sys.argv)
        made = []
        for plan in plans:
            print(f"exporting {plan.name} to {arguments.target}", file=sys.stderr, flush=True)
            made.append(_export_one(arguments, run, model, plan))
        return made


def _source(arguments: argparse.Namespace, run: Run) -> LoadedModel | Path:
    if not arguments.stream:
        return options.load_run_model(arguments, run)
    if arguments.target != "gguf":
        raise PlanError("--stream is for --target gguf; OpenVINO's converter needs the whole model")
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
    run.store(
        "artifact", f"{arguments.target}/{plan.name}", artifact.to_json() | {"folder": str(folder.resolve())}
    )
    return folder, artifact


def _run(arguments: argparse.Namespace) -> Run:
    if arguments.run is None and arguments.model is not None:
        raise PlanError(
            "say what to export: --format FORMAT for a whole model, or --run DIR [--plan NAME] for plans"
        )
    return options.open_run(arguments)


def _print(artifacts: list[tuple[Path, Artifact]]) -> None:
    table = Table(title="Exported", title_justify="left")
    for column in ("plan", "target"):
        table.add_column(column)
    table.add_column("planned", justify="right")
    table.add_column("on disk", justify="right")
    table.add_column("not as planned")
    table.add_column("folder", overflow="fold")
    for folder, artifact in artifacts:
        fallbacks = [t for t in artifact.tensors if t.reason and t.planned not in ("fp16", t.realised)]
        table.add_row(
            artifact.plan,
            artifact.target,
            human_bytes(artifact.planned_bytes),
            human_bytes(artifact.realised_bytes),
            ""
            if not fallbacks
            else f"{len(fallbacks)}, e.g. {fallbacks[0].component}: {fallbacks[0].reason}",
            str(folder),
        )
    console = options.console()
    console.print(table)
    console.print(
        f'Next: kl-lens generate {shlex.quote(str(artifacts[0][0]))} --prompt "Once upon a time"',
        soft_wrap=True,
    )
