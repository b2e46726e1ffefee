"""Writes a GGUF file from a model and a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kl_lens.base.errors import CheckpointError, FormatError, PlanError
from kl_lens.base.version import __version__
from kl_lens.model import LoadedModel, load_tokenizer, mamba_ssm
from kl_lens.model.anatomy import component_name
from kl_lens.model.files import and_more, check_sizes, read_config, refuse_quantized
from kl_lens.model.opening import why_not_loaded
from kl_lens.model.streaming import CheckpointTensors, ModelTensors, TensorSource
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.gguf.architectures import check_complete, get_architecture
from kl_lens.targets.gguf.architectures.base import Shapes, TensorRule
from kl_lens.targets.gguf.tokenizer import TOKENIZER_CHECK, tokenizer_data
from kl_lens.targets.gguf.writer import (
    FLOAT32,
    Header,
    TensorJob,
    file_name,
    general_metadata,
    parameter_counts,
    size_on_disk,
    write_files,
)
from kl_lens.targets.tokenizer import end_ids
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe
from kl_lens.weights.store import Statistics, WeightStore

FORMATS = (  # that plans for this target may use
    FP16, "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q4_1", "iq4_nl", "iq4_xs", "q3_k", "iq3_s", "iq3_xxs",
    "q2_k", "iq2_s", "iq2_xs", "iq2_xxs",
)  # fmt: skip
STAND_INS = (*FORMATS, "q5_0", "q5_1", FLOAT32)  # also in files: fallbacks and exact copies
_ALIASES = {"f16": FP16, "f32": FLOAT32}  # llama.cpp's own spelling
PART_BYTES = 50 * 10**9  # the largest file that the Hugging Face hub takes


@dataclass(frozen=True)
class Source:
    """What a file is made from."""

    name: str
    folder: Path  # whose model card and settings the file quotes
    config: Any
    tensors: TensorSource
    store: WeightStore
    fingerprint: str


@contextmanager
def source_of(
    model: LoadedModel | Path, statistics: Statistics | None = None, weights_folder: Path | None = None
) -> Iterator[Source]:
    """An opened model, or a checkpoint folder, which is read tensor by tensor."""
    tensors: TensorSource
    if isinstance(model, LoadedModel):
        config, folder = model.config, model.folder
        on_disk = model.residency is not None
        tensors = CheckpointTensors.fitting(folder, config) if on_disk else ModelTensors(model.model)
        source = Source(model.name, folder, config, tensors, model.weights, model.fingerprint)
    else:
        config, name = read_configuration(model), model.resolve().name
        tensors = CheckpointTensors.fitting(model, config)
        store = WeightStore(tensors, statistics, weights_folder, memory_budget=0)
        source = Source(name, model, config, tensors, store, "")
    try:
        yield source
    finally:
        tensors.close()


def tensor_jobs(source: Source, plan: Plan, *, fallback: bool = True) -> list[TensorJob]:
    """Every tensor of the file with its recipe; without `fallback`, FormatError if one is not the planned."""
    architecture, shapes = get_architecture(source.config.model_type), source.tensors.shapes
    architecture.require(source.config)
    rules = architecture.tensors(source.config, shapes)
    check_complete(rules, shapes)
    recipes = _recipes(plan, source.tensors)
    return [_decide(rule, shapes, recipes, fallback) for rule in rules]


def _recipes(plan: Plan, tensors: TensorSource) -> dict[str, Recipe | None]:
    """Component → recipe (None: F32). Raises for unknown components or formats, and for tied weights in two formats."""
    shapes = tensors.shapes
    components = {component_name(name, len(shape)) for name, shape in shapes.items()}
    tied = {
        component_name(alias, len(shapes[first])): component_name(first, len(shapes[first]))
        for alias, first in tensors.aliases.items()
    }
    if unknown := sorted(set(plan.assignment) - components - set(tied)):
        raise PlanError(f"plan {plan.name}: the model has no component {unknown[0]}{and_more(unknown)}")
    chosen: dict[str, Recipe | None] = {}
    for component, planned in plan.assignment.items():
        spelling = {"f16": FP16, "f32": FLOAT32}.get(planned, planned)  # llama.cpp's own spelling
        name = spelling.partition("+")[0]
        if name not in STAND_INS:
            raise PlanError(
                f"plan {plan.name}: GGUF has no format {name!r} ({component}); it has {', '.join(FORMATS)}. Make a "
                "plan for it with: kl-lens plan --target gguf"
            )
        wanted = None if name == FLOAT32 else Recipe.parse(spelling)
        owner = tied.get(component, component)
        if chosen.setdefault(owner, wanted) != wanted:
            raise PlanError(f"plan {plan.name}: {component} is tied to {owner}, but planned in two formats")
    return chosen


def _decide(
    rule: TensorRule, shapes: Shapes, recipes: Mapping[str, Recipe | None], fallback: bool
) -> TensorJob:
    shape, component = rule.shape or (), rule.name
    if rule.parameter is not None:
        source = shapes[rule.parameter]
        shape = tuple(rule.transform(torch.empty(source, device="meta")).shape)
        component = component_name(rule.parameter, len(source))
    planned = recipes.get(component, FP16)
    recipe, reason = None, "llama.cpp computes with it in F32" if rule.float32 else None
    if planned is not None and not rule.float32:
        recipe, reason = fitting_recipe(planned, rule.stretch(shape))
    if not fallback and reason and not (rule.float32 and planned in (FP16, None)):
        raise FormatError(f"{component}: {planned} is not possible: {reason}; change the plan")
    return TensorJob(rule, component, shape, planned, recipe, reason)


def export(
    model: LoadedModel | Path,
    plan: Plan,
    folder: Path,
    *,
    include_tokenizer: bool = True,
    part_bytes: int = PART_BYTES,
    fingerprint: str | None = None,
    statistics: Statistics | None = None,
    weights_folder: Path | None = None,
) -> Artifact:
    """Writes the file to `folder`, named by llama.cpp's convention; returns a record of every component.

    A checkpoint folder is streamed: one tensor at a time is read, quantized and written. Components that the plan does
    not name stay FP16; where a format does not fit, llama.cpp's substitute is stored and recorded. On an error, nothing
    is left behind.

    Args:
        include_tokenizer: False writes a file that works with token ids only.
        part_bytes: files with more bytes of weights than this are split; llama.cpp opens them by the first part.
        fingerprint: recorded as the model's, if the caller knows it (a streamed folder has none).
        statistics, weights_folder: for a streamed folder: calibration statistics for learnt recipes, and where to
            keep weights that are expensive to quantize. An opened model has its own.
    """
    with source_of(model, statistics, weights_folder) as source:
        tokenizer = None
        if include_tokenizer and isinstance(model, LoadedModel):
            tokenizer = model.tokenizer
        elif include_tokenizer:
            tokenizer = load_tokenizer(source.folder, None, False)
        source = replace(source, fingerprint=fingerprint or source.fingerprint)
        header = _prepared(source, plan, tokenizer, part_bytes)
        recipes = (job.recipe for job in header.jobs if job.recipe is not None)
        learnt = source.store.learnt_by(recipes, plan.statistics)
        files, digests = write_files(folder, header, source.tensors, source.store)
    architecture, text = get_architecture(source.config.model_type), header.tokenizer
    records = [job.record(*digests[job.rule.name]) for job in header.jobs]
    return Artifact(
        target="gguf",
        plan=plan.name,
        files=tuple(path.name for path in files),
        tensors=tuple(records),
        planned_bytes=sum(job.planned_bytes for job in header.jobs),
        realised_bytes=sum(path.stat().st_size for path in files),
        model=source.name,
        model_fingerprint=source.fingerprint,
        settings={
            "architecture": header.architecture,
            "tokenizer": text.pre if text else "none",
            "tensor_bytes": sum(job.bytes for job in header.jobs),
            "fallbacks": sum(1 for record in records if record.realised not in (record.planned, FLOAT32)),
            **({TOKENIZER_CHECK: text.check} if text else {}),
            "notes": [*architecture.notes(source.config), *(text.notes if text else ())],
            **({"statistics": learnt} if learnt else {}),
        },
    )


def file_bytes(model: LoadedModel, plan: Plan) -> int:
    """The exact size of the file that `export` would write for an opened model, without quantizing anything."""
    with source_of(model) as source:
        return size_on_disk(_prepared(source, plan, model.tokenizer, PART_BYTES))


def _prepared(source: Source, plan: Plan, tokenizer: Any | None, part_bytes: int) -> Header:
    """Everything about a file that is known before reading weights."""
    config, tensors = source.config, source.tensors
    jobs = tensor_jobs(source, plan)
    jobs.sort(key=lambda job: tensors.place(job.rule.parameter) if job.rule.parameter else 0)
    vocabulary = next(job.shape[0] for job in jobs if job.rule.name == "token_embd.weight")
    architecture = get_architecture(config.model_type)
    metadata = {
        "kl_lens.version": __version__,
        "kl_lens.plan": plan.name,
        "kl_lens.model_fingerprint": source.fingerprint,
        **{f".{key}": value for key, value in architecture.metadata(config).items()},
        ".vocab_size": vocabulary,
    }
    text = None if tokenizer is None else tokenizer_data(tokenizer, vocabulary, end_ids(source.folder))
    general = general_metadata(source.folder, source.name, parameter_counts(jobs))
    file = file_name(general, plan, jobs)
    return Header(architecture.name(config), metadata, general, text, jobs, file, part_bytes)


def uniform_plan(folder: Path, format_name: str) -> Plan:
    """One format for every component of a checkpoint that llama.cpp can hold in it, without loading the weights."""
    config = read_configuration(folder)
    architecture = get_architecture(config.model_type)
    architecture.require(config)
    shapes = CheckpointTensors.fitting(folder, config).shapes
    chosen = {
        component_name(rule.parameter, len(shapes[rule.parameter])): format_name
        for rule in architecture.tensors(config, shapes)
        if rule.parameter is not None and not rule.float32 and len(shapes[rule.parameter]) >= 2
    }
    assignment = {} if format_name in (FP16, "f16") else chosen
    name = f"uniform_{format_name.replace('+', '.')}"
    return Plan(name=name, assignment=assignment, made_by="one format for everything")


def read_configuration(folder: Path) -> Any:
    """The transformers configuration of a checkpoint folder, whichever library wrote it."""
    raw = read_config(folder)
    check_sizes(folder, raw)
    refuse_quantized(folder, raw, "give the original checkpoint, in 16 or 32 bits")
    if mamba_ssm.is_layout(raw):
        return mamba_ssm.configuration(folder, raw)
    kind = str(raw.get("model_type"))
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == f"{kind}_text":
        kind = f"{kind}_text"  # of a multimodal model, only the language model is exported
    get_architecture(kind)  # a clear refusal before transformers looks at it
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return config.get_text_config() if isinstance(text, dict) else config
    except Exception as error:  # libraries raise all kinds of errors for odd settings
        raise CheckpointError(why_not_loaded(folder, raw, error)) from error
