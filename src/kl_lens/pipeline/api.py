"""The stages on opened models and records, in their order: what `kl_lens.measure` and its neighbours are."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_lens import evaluation, planning, profiling, reporting, targets
from kl_lens.calibration import StoredStatistics, gather
from kl_lens.checkpoints import LoadedModel
from kl_lens.checkpoints.tasks import Source
from kl_lens.errors import TargetError
from kl_lens.pipeline.calibrating import DEFAULT_SEED, DEFAULT_WINDOWS
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.generating import GenerateResult, GenerateSettings, generate as generate_text
from kl_lens.pipeline.measuring import chosen_methods, wanted_recipes
from kl_lens.pipeline.planning import verified
from kl_lens.pipeline.ranking import rank_run
from kl_lens.pipeline.workbench import WEIGHTS, Workbench
from kl_lens.recipes import Recipe
from kl_lens.records import Artifact, Plan, Profile, Score, SensitivityTable
from kl_lens.runs import Run
from kl_lens.sensitivity.correlation import Ranking
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, FastEngine
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.sweep import Progress, Sweep, model_identity
from kl_lens.text import refuse_overlap
from kl_lens.units import parse_bytes


def measure(
    model: LoadedModel,
    text: Source = "wikitext2:train",
    formats: Sequence[str] = ("int4", "int8"),
    *,
    methods: Sequence[str] = (),
    windows: int = 64,
    window_length: int | None = None,
    seed: int = 42,
    components: str | None = None,
    run: Path | str | None = None,
    engine: str = FastEngine.name,
    memory_budget: int = DEFAULT_MEMORY,
    as_deployed: str | None = None,
    progress: Progress | None = None,
    precision: str | None = None,
) -> SensitivityTable:
    """How much each component suffers from each format.

    Args:
        model: from `kl_lens.load`.
        text: a name (`wikitext2:train`), a file, or a source from `kl_lens.text`; for a classifier, images
            (`digits:train`, a folder), those that it was opened with unless some are named.
        formats: names from `kl_lens.formats.known_formats()`, alone or with a method: `int4-g64+gptq`.
        methods: every format by each of these (`rtn`, `search`, `imatrix`, `gptq`), or `["auto"]`. Those that learn
            take what `calibrate` or the run has, or gather it on other windows of the same text.
        windows: how many windows of `window_length` tokens (512) or images (16) are drawn, with `seed`.
        components: regular expression; only components whose name matches.
        run: a run folder to keep the measurements in, and to go on from; a temporary one when not given.
        engine: `fast`, or `plain`, the reference.
        as_deployed: a target; also quantize the activations as its kernels do.
        precision: of products on a GPU: `float32`, `tf32x3`, `tf32` or `bf16`; chosen by its noise when not given.

    Example:
        >>> table = measure(load("reference:mamba"), formats=["int4", "int8"], windows=8)
    """
    recipes, _ = wanted_recipes(formats, methods)
    candidates, _ = find_candidates(model.anatomy, recipes, components)
    drawn = model.task.drawn(text, windows=windows, length=window_length, seed=seed)
    with tempfile.TemporaryDirectory() as temporary, Run.create(Path(run or temporary)) as journal:
        kernels = targets.deployed(as_deployed)
        sweep = Sweep(model, journal, engine, memory_budget, progress or Progress(), kernels, precision)
        sweep.identify(drawn)
        if any(Recipe.parse(each.format).quantizer.learns for each in candidates):
            known = None if run is None else StoredStatistics.held_by(Path(run))
            if known is None and model.weights.statistics is None:
                few = min(DEFAULT_WINDOWS, drawn.stream_tokens // drawn.length)
                calibrate(model, text, few, window_length=drawn.length, seed=seed + 1, run=run)
            elif run is not None and known is not None:
                model.weights.learn_from(StoredStatistics.open(Path(run), model))
        choice = chosen_methods(model, candidates, methods, Events())
        sweep.measure(choice.candidates if choice else candidates, drawn)
        return journal.table(target=as_deployed)


def calibrate(
    model: LoadedModel,
    text: Source = "wikitext2:train",
    windows: int = DEFAULT_WINDOWS,
    *,
    window_length: int | None = None,
    seed: int = DEFAULT_SEED + 1,
    run: Path | str | None = None,
) -> StoredStatistics:
    """What a text shows of every component's inputs; from now on the model's recipes learn from it.

    Args:
        model: from `kl_lens.load`.
        text: a name (`wikitext2:train`), a file, or a source from `kl_lens.text`; never one that judges the result.
        windows: how many windows of `window_length` tokens are drawn, with `seed`: another than `measure`'s.
        run: a run folder to keep the statistics and the learnt weights in; a temporary one when not given.

    Example:
        >>> calibrate(model, windows=8)
        >>> export(model, plan, "openvino", "out/mamba-gptq")    # a plan with recipes such as int4-g64+gptq
    """
    drawn = model.task.drawn(text, windows=windows, length=window_length, seed=seed)
    folder = Path(run) if run is not None else Path(tempfile.mkdtemp(prefix="kl-lens-"))
    if run is not None:
        with Run.create(folder) as journal:
            journal.identify(model_identity(model))
    statistics = gather(model, drawn, folder)
    if run is None:
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    model.weights.keep_in(folder / WEIGHTS)
    model.weights.learn_from(statistics)
    return statistics


def rank(
    model: LoadedModel,
    run: Path | str,
    text: Source = "wikitext2:test",
    *,
    windows: int = 128,
    other_texts: Sequence[str] = (),
    memory_budget: int = DEFAULT_MEMORY,
) -> Ranking:
    """Which metric predicts the damage that a run's candidates do on held-out text; kept in the run.

    Args:
        model: the run's, from `kl_lens.load`.
        run: a run folder with measurements.
        text: held-out text; refused where the run was calibrated on some of it.
        other_texts: out-of-domain texts to calibrate on as well.

    Example:
        >>> rank(model, "runs/mine", windows=8).correlations[0].tau
    """
    with Run.open(Path(run)) as journal:
        calibration = Workbench().calibration(journal, model.task)
        held_out = model.task.in_order(text, length=calibration.length, limit=windows)
        refuse_overlap(calibration, held_out)
        return rank_run(journal, model, held_out, other_texts, memory_budget)


def plan(
    table: SensitivityTable, *, max_bytes: int | str | None = None, name: str | None = None, **limits: Any
) -> Plan:
    """The best plan within a budget, proven optimal; see `kl_lens.planning.plan_for_budget` for all limits.

    Example:
        >>> plan(table, max_bytes="4MB").assignment
    """
    size = parse_bytes(max_bytes) if isinstance(max_bytes, str) else max_bytes
    return planning.plan_for_budget(table, max_bytes=size, name=name, **limits).plan


def verify(
    model: LoadedModel,
    plan: Plan,
    table: SensitivityTable,
    text: Source = "wikitext2:valid",
    *,
    windows: int = 32,
    window_length: int | None = None,
) -> Plan:
    """The plan with its KL and perplexity as a whole, measured on held-out text.

    Example:
        >>> verify(model, plan, table, windows=8).measured.kl
    """
    length = window_length or model.task.window_length
    held_out = model.task.in_order(text, length=length, limit=windows)
    return verified(plan, table, PlanMeter(model, held_out))


def export(model: LoadedModel, plan: Plan, target: str, folder: Path | str, **options: Any) -> Artifact:
    """Writes a plan as files of a target (`openvino`, `gguf`).

    Example:
        >>> export(model, plan, "openvino", "out/mamba-4mb")
    """
    artifact = targets.export(model, plan, target, Path(folder), **options)
    # The record beside the files needs no path; whoever holds the object alone does.
    return replace(artifact, settings=artifact.settings | {"folder": str(Path(folder).resolve())})


def evaluate(
    subject: Artifact | LoadedModel | Path | str,
    text: Source = "wikitext2:test",
    *,
    plan: Plan | None = None,
    original: LoadedModel | None = None,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    exact: bool = False,
    device: str = "CPU",
    threads: int | None = None,
    gpu_layers: int = 0,
) -> Score:
    """Token and word perplexity of a model on a text, with standard errors over windows; a classifier's top-1.

    Args:
        subject: what `export` returned, an exported folder or a .gguf file; or an opened model, which with `plan`
            is fake-quantized in PyTorch.
        text: a name (`wikitext2:test`), a file, or a source from `kl_lens.text`.
        original: the original model: the score then also holds the changes against it and the KL from it.
        window, stride, limit: windows of so many tokens (2048) or images (16), one every `stride`, at most `limit`.
        exact, device, threads, gpu_layers: how a file is run.

    Example:
        >>> evaluate(artifact, text=kl.text.wikitext2("test"), limit=20).values["token_perplexity"]
    """
    if isinstance(subject, LoadedModel):
        judged: evaluation.Judged = (
            evaluation.JudgedModel.of_plan(subject, plan.name, plan.assignment, plan.statistics)
            if plan
            else evaluation.JudgedModel(subject)
        )
        task = subject.task
    else:
        settings = evaluation.SessionSettings(device, threads, gpu_layers, exact)
        file = evaluation.JudgedArtifact(_place(subject), settings)
        judged = file
        task = evaluation.artifact_task(file) if original is None else original.task
    prepared = evaluation.prepare(text, task, window=window, stride=stride, limit=limit)
    return evaluation.evaluate_text(judged, prepared, original)


def _place(artifact: Artifact | Path | str) -> Path:
    if not isinstance(artifact, Artifact):
        return Path(artifact)
    if "folder" not in artifact.settings:
        raise TargetError(f"this record of {artifact.plan} does not say where its files are; pass the folder")
    return Path(artifact.settings["folder"])


def benchmark(artifact: Artifact | Path | str, **settings: Any) -> Profile:
    """How fast and how large one exported model is, in the way a user feels it.

    Args:
        artifact: from `export`, or an exported folder, or a .gguf file.
        settings: of `kl_lens.profiling.UseSettings`: prompt_lengths, new_tokens, repeats, device, threads, …

    Example:
        >>> benchmark("out/mamba-4mb", repeats=3).timings["tokens_per_second"].median
    """
    path = _place(artifact)
    report = profiling.Benchmark(profiling.UseSettings(**settings)).measure([path])
    if report.failures:
        raise TargetError(report.failures[0].reason)
    if not report.profiles:
        raise TargetError(report.notes[0])
    return report.profiles[0]


def generate(artifact: Artifact | Path | str, prompt: str, **settings: Any) -> GenerateResult:
    """Text from an exported model, and how fast it came.

    Args:
        artifact: from `export`, or an exported folder, or a .gguf file.
        settings: of `kl_lens.pipeline.GenerateSettings`: max_new_tokens, temperature, seed, tokenizer, threads, …

    Example:
        >>> generate("out/mamba-4mb", "The history of the city").text
    """
    return generate_text(GenerateSettings(artifact=_place(artifact), prompt=prompt, **settings), Events())


def report(run: Path | str, *others: Path | str, path: Path | None = None) -> Path:
    """A run as one HTML file, or several on one page; returns where it was written.

    Example:
        >>> report("runs/mine")
    """
    if others:
        return reporting.write_comparison([Path(run), *map(Path, others)], path)
    with Run.open(Path(run)) as journal:
        return reporting.write_report(journal, path)
