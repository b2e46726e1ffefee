"""What `inspect`, `calibrate`, `measure`, `table`, `merge`, `plan` and `export` show."""

from __future__ import annotations

import csv
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kl_lens.base.units import human_bytes, human_kl, spell_bytes
from kl_lens.cli.progress import clock_time
from kl_lens.cli.terminal import Bold, Row, Shown, table
from kl_lens.reporting.names import number, runtime_title, sum_of_parts
from kl_lens.run.records import Component
from kl_lens.study.calibrate import CalibrateResult
from kl_lens.study.export import ExportedFile
from kl_lens.study.inspect import FitResult, Inspected, ReachResult, bytes_of
from kl_lens.study.measure import MeasureResult
from kl_lens.study.merge import MergeResult
from kl_lens.study.plan import PlanResult
from kl_lens.study.table import TableResult

_SHOWN_POINTS = 25  # of a frontier

# -- inspect -------------------------------------------------------------------------------------------------


def _fits(result: FitResult) -> Shown:
    rows = [
        {
            "for": runtime_title(row.target),
            "weights": row.format,
            **{
                part: human_bytes(getattr(row, part))
                for part in ("file", "states", "caches", "runtime", "total")
            },
            "fits": "yes" if row.total <= result.memory else "no",
        }
        for row in result.rows
    ]
    use = result.use
    size = spell_bytes(result.memory)
    yield table(
        f"Memory of {result.model} for {use.batch} × {use.context:,} tokens", rows
    )
    if all(row.total > result.memory for row in result.rows):
        yield f"Nothing fits into {size}: take a shorter --context or a smaller --batch."
        return
    target = ""
    if making := result.making:
        job = making.job
        target = f" --target {making.target}"
        yield (
            f"Making a file for {runtime_title(making.target)} here: about {clock_time(job.seconds)} h, "
            f"{human_bytes(job.memory)} of memory, {human_bytes(making.download + job.disk)} of disk with the model "
            f"itself ({human_bytes(making.download)}). Counted from its shapes, without its weights: kl-lens run "
            "--estimate times it."
        )
        if job.memory > making.free_memory:
            yield (
                f"Only {human_bytes(making.free_memory)} of memory are free: weights will be read from disk again and "
                "again, which takes longer."
            )
    model = shlex.quote(result.model)
    limit = f"--memory {size} --context {use.context} --batch {use.batch}"
    yield f"Next: kl-lens run {model}{target} {limit}"


def _reaches(result: ReachResult) -> Shown:
    rows = [
        {
            "for": runtime_title(row.target),
            "menu": row.menu,
            "smallest file": human_bytes(row.bytes),
            "bits per weight": f"{row.bits_per_weight:.2f}",
            "reached": "yes" if row.bytes <= result.max_bytes else "no",
        }
        for row in result.rows
    ]
    yield table(f"Files of {result.model}, without their headers", rows)
    if any(row.bytes <= result.max_bytes for row in result.rows):
        size = spell_bytes(result.max_bytes)
        yield f"Next: kl-lens run {shlex.quote(result.model)} --max-bytes {size}"


def show_inspect(result: Inspected) -> Shown:
    if isinstance(result, ReachResult):
        yield from _reaches(result)
        return
    if isinstance(result, FitResult):
        yield from _fits(result)
        return
    model = result
    anatomy = model.anatomy
    tied = (
        "head tied to the embedding" if anatomy.head == anatomy.embedding else "own head"
    )
    yield Bold(
        f"{model.name}  {anatomy.model_type}, {anatomy.blocks} blocks, {anatomy.parameters:,} parameters, "
        f"{len(anatomy.candidates)} quantizable components, {tied}"
    )
    if not model.classifier:
        yield f"BOS: {model.beginning.words}."
    yield table("Quantizable components", [*_blocks(anatomy.components)])
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in anatomy.components:
        if not component.quantizable:
            groups[component.kind, component.reason or ""].append(component)
    rows = [
        {
            "kind": kind,
            "tensors": str(len(members)),
            "parameters": _parameters(members),
            "why": reason,
        }
        for (kind, reason), members in groups.items()
    ]
    yield table("Left alone", rows)
    yield from (f"Note: {note}" for note in model.notes)


def _blocks(components: Sequence[Component]) -> Iterator[Row | None]:
    """One row per block and family, and sums."""
    candidates = [c for c in components if c.quantizable]
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in candidates:
        shared = (
            f" (shared by {len(component.blocks)})" if len(component.blocks) > 1 else ""
        )
        block = (
            component.family if component.block is None else f"{component.block}{shared}"
        )
        groups[block, component.family].append(component)
    heading = "components (rows × columns)"
    for (block, family), members in groups.items():
        shapes = ", ".join(f"{c.kind} {_shape(c)}" for c in members)
        yield {"block": block, "family": family, heading: shapes} | _sizes(members)
    yield None
    left_alone = [c for c in components if not c.quantizable]
    sums: dict[str, Sequence[Component]] = {
        "quantizable": candidates,
        "left alone": left_alone,
        Bold("all"): components,
    }
    for name, parts in sums.items():
        yield {heading: name} | _sizes(parts)


def _sizes(components: Sequence[Component]) -> Row:
    sizes = {p.upper(): human_bytes(b) for p, b in bytes_of(*components).items()}
    return {"parameters": _parameters(components)} | sizes


def _parameters(components: Sequence[Component]) -> str:
    return f"{sum(c.parameters for c in components):,}"


def _shape(component: Component) -> str:
    return "×".join(str(size) for size in component.shape)


def json_inspect(result: Inspected) -> dict[str, Any]:
    if isinstance(result, ReachResult):
        return asdict(result)
    if isinstance(result, FitResult):
        rows = [asdict(row) | {"total": row.total} for row in result.rows]
        making = result.making
        return {
            "model": result.model,
            "memory": result.memory,
            **asdict(result.use),
            "rows": rows,
            "making": making and asdict(making) | {"seconds": making.job.seconds},
        }
    model = result
    anatomy = model.anatomy
    return {
        **{name: getattr(model, name) for name in ("name", "layout", "fingerprint")},
        **{
            name: getattr(anatomy, name)
            for name in ("model_type", "blocks", "embedding", "head")
        },
        "parameters": anatomy.parameters,
        "bytes": bytes_of(*anatomy.components),
        "notes": model.notes,
        "bos": model.beginning.choice,
        "components": [c.to_json() | {"bytes": bytes_of(c)} for c in anatomy.components],
    }


# -- calibrate, measure, merge -------------------------------------------------------------------------------


def show_calibrate(result: CalibrateResult) -> Shown:
    text = result.text
    statistics = result.statistics
    label = f"{text['source']}:{text['split']}" if text["split"] else text["source"]
    yield (
        f"Statistics {statistics.digest} of {statistics.identity['model']}: {label}, {text['windows']} windows of "
        f"{text['length']} tokens, in {statistics.folder}"
    )
    command = [
        "measure",
        result.model,
        "--run",
        str(result.folder),
        "--formats",
        "int4-g64,int4-g64+gptq",
    ]
    yield f"Next: kl-lens {shlex.join(command)}"


def json_calibrate(result: CalibrateResult) -> dict[str, Any]:
    text = {
        name: result.text[name]
        for name in ("source", "split", "windows", "length", "seed")
    }
    statistics = result.statistics
    return {
        "folder": result.folder,
        "digest": statistics.digest,
        "text": text,
        "notes": statistics.notes,
    }


def _states(result: MeasureResult) -> Iterator[Row]:
    """KL in every quarter of the windows, or so."""
    for m, curve in zip(result.measurements, result.curves, strict=True):
        kl = m.metrics["kl_teacher_to_student"]
        row = {
            "state or cache": m.component,
            "format": m.format,
            "KL, nats": f"{kl.value:.2e}",
            "±": number(kl.standard_error, 1),
        }
        bins = zip(curve.starts, curve.means, strict=True)
        yield (
            row
            | {f"from {start}": f"{mean.value:.1e}" for start, mean in bins}
            | {"drift": curve.trend}
        )


def show_measure(result: MeasureResult) -> Shown:
    if result.curves:
        yield table("States and caches, by position (tokens)", [*_states(result)])
        sweep = result.sweep
        yield f"{sweep.measured} candidate × window pairs measured in {sweep.seconds:.1f} s, {sweep.reused} reused."
        return
    rows = []
    for m in sorted(
        result.measurements, key=lambda m: m.metrics["kl_teacher_to_student"].value
    ):
        kl = m.metrics["kl_teacher_to_student"]
        rows.append(
            {
                "component": m.component,
                "format": m.format,
                "KL, nats": f"{kl.value:.3e}{'' if kl.value > result.noise else ' (noise)'}",
                "±": number(kl.standard_error, 2),
                "KL 99 %": f"{m.metrics['kl_p99'].value:.2e}",
                "MSE": f"{m.metrics['mse'].value:.2e}",
                "SQNR, dB": f"{m.metrics['sqnr_db'].value:.1f}",
                "ΔCE, nats": f"{m.metrics['delta_cross_entropy'].value:+.2e}",
                "same top": f"{m.metrics['same_top'].value:.2%}",
            }
        )
    sweep = result.sweep
    products = (
        "" if sweep.precision == "float32" else f", with products in {sweep.precision}"
    )
    yield table(
        f"Sensitivity, from least to most (per {result.unit.removesuffix('s')})", rows
    )
    yield (
        f"{sweep.candidates} candidates × {sweep.windows} windows ({sweep.tokens:,} {result.unit} each); "
        f"{sweep.measured} candidate × window pairs measured in {sweep.seconds:.1f} s, {sweep.reused} reused. "
        f"Noise floor: KL {result.noise:.1e}{products}."
    )
    if result.share is not None:
        share, count = result.share
        yield f"This is share {share}/{count}. When all are done: kl-lens merge {result.folder.parent.parent}"
    else:
        yield _next_plan(result.folder, result.target)


def _next_plan(folder: Path, target: str | None) -> str:
    of_target = ["--target", target] if target else []
    command = ["plan", "--run", str(folder), *of_target, "--max-loss", "0.01"]
    return f"Next: kl-lens {shlex.join(command)}"


def json_table(result: TableResult) -> list[dict[str, Any]]:
    return result.rows


def show_table(result: TableResult) -> Shown:
    if result.out is not None:
        yield f"{result.out}: {human_bytes(result.out.stat().st_size)}"
        return
    if result.csv:
        names = dict.fromkeys(name for row in result.rows for name in row)
        writer = csv.DictWriter(sys.stdout, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.rows)
        return
    yield table(
        "Sensitivity, from the first block to the last",
        [
            {
                "component": row["component"],
                "recipe": row["recipe"],
                "size": human_bytes(row["bytes"]),
                "bits": f"{row['bits']:.2f}",
                "KL, nats": human_kl(row["kl_teacher_to_student"]),
                "±": number(row["kl_teacher_to_student_se"], 2)
                if row["measured"]
                else "",
                "": "" if row["measured"] else "predicted",
            }
            for row in result.rows
        ],
    )
    yield "KL per token when this component alone is quantized. All metrics: --csv or --json."


def show_merge(result: MergeResult) -> Shown:
    rows = [
        {
            "from": str(joined.source),
            "new": str(joined.added),
            "already there": str(joined.repeated),
            "already there, different": str(joined.differing),
        }
        for joined in result.joined
    ]
    if rows:
        yield table("Joined candidate × window pairs", rows)
    if result.missing:
        yield f"No shard has measured {result.missing} candidate × window pairs. Measure them without --shard."
    elif rows:
        yield _next_plan(result.folder, None)


# -- plan ----------------------------------------------------------------------------------------------------


def show_plan(result: PlanResult) -> Shown:
    if result.frontier is not None:
        yield from _frontier(result)
        yield from _corrections([result.interaction])
        return
    rows = []
    for plan in result.plans:
        cost = result.cost(plan)
        measured = plan.measured
        rows.append(
            {
                "plan": plan.name,
                "size": human_bytes(plan.file_bytes or cost.bytes),
                "bits/weight": f"{cost.bits_per_weight:.3f}",
                "predicted KL": ""
                if plan.predicted_kl is None
                else f"{plan.predicted_kl:.4e}",
                "measured KL": f"{measured.kl.value:.4e}" if measured else "",
                "perplexity": f"{measured.perplexity.value:.3f}" if measured else "",
                "components per format (share of the weights)": cost.shares_text,
            }
        )
    yield table(f"Plans for {result.table.model}", rows)
    yield from _corrections(plan.interaction for plan in result.plans)
    count = len(result.plans)
    yield f"{count} plan{'s' if count != 1 else ''}, written to {result.written_to}."


def _frontier(result: PlanResult) -> Shown:
    frontier = result.frontier or ()
    last = len(frontier) - 1
    indices = {round(i * last / (_SHOWN_POINTS - 1)) for i in range(_SHOWN_POINTS)}
    rows = [
        {
            "size": human_bytes(frontier[index].file_bytes),
            "predicted KL": human_kl(frontier[index].predicted_kl),
        }
        for index in sorted(indices)
    ]
    yield table(f"Pareto frontier of {result.table.model}: {len(frontier):,} plans", rows)
    yield f"{len(rows)} of them shown; --json gives all. For any size between: --max-bytes SIZE."


def _corrections(factors: Iterable[float]) -> Shown:
    for factor in sorted({*factors} - {1.0}):
        yield f"Predicted KL is {sum_of_parts(factor)}."


def json_plan(result: PlanResult) -> Any:
    if result.frontier is not None:
        return [asdict(point) for point in result.frontier]
    return [
        plan.to_json()
        | {
            "file_bytes": plan.file_bytes,
            "bits_per_weight": result.cost(plan).bits_per_weight,
        }
        for plan in result.plans
    ]


# -- export --------------------------------------------------------------------------------------------------


def show_export(files: list[ExportedFile]) -> Shown:
    rows = []
    for file in files:
        artifact = file.artifact
        lowered = file.lowered
        rows.append(
            {
                "plan": artifact.plan,
                "for": runtime_title(artifact.target),
                "planned": human_bytes(artifact.planned_bytes),
                "on disk": human_bytes(artifact.realised_bytes),
                "differs from the plan": f"{len(lowered)}, e.g. {lowered[0].component}: {lowered[0].reason}"
                if lowered
                else "",
                "folder": str(file.folder),
            }
        )
    yield table("Exported", rows)
    for file in files:
        artifact = file.artifact
        changes = [
            f" {'+' if size > 0 else '−'} {human_bytes(abs(size))} for {cause}"
            for cause, size in file.besides_plan.items()
            if size
        ]
        yield (
            f"{artifact.plan}: {human_bytes(artifact.realised_bytes)} on disk = "
            f"{human_bytes(artifact.planned_bytes)} of weights as planned{''.join(changes)}."
        )
    notes = [note for file in files for note in file.artifact.settings.get("notes", ())]
    command, why = _next(files[0])
    yield from (f"Note: {note}." for note in dict.fromkeys([*notes, *why]))
    if command:
        yield f"Next: kl-lens {command}"


def json_export(files: list[ExportedFile]) -> list[dict[str, Any]]:
    return [file.artifact.to_json() | {"folder": file.folder} for file in files]


def _next(file: ExportedFile) -> tuple[str, list[str]]:
    """A command that works with these files, and why it is not the usual one."""
    path = shlex.quote(str(file.folder))
    settings = file.artifact.settings
    if "task" in settings:
        return f"evaluate {path} --images FOLDER", []
    if settings.get("static_tokens"):
        return "", ["made for programs that time it, such as benchmark_app"]
    if not file.has_tokenizer:
        return f"benchmark {path}", [
            "it holds no tokenizer; generate takes one with --tokenizer"
        ]
    return f'generate {path} --prompt "Once upon a time"', []
