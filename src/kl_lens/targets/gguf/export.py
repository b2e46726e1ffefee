"""Writes a GGUF file from a model and a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.version import __version__
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.gguf.general import end_tokens, file_name, general_metadata
from kl_lens.targets.gguf.tokenizer import TOKENIZER_CHECK, tokenizer_data
from kl_lens.targets.gguf.writer import FLOAT32, Header, parameter_counts, size_on_disk, write_files
from kl_lens.weights.formats import FP16

# The package exports `export`, so this module loads even when a file is only run: torch and transformers are imported
# inside functions. (A lazy `export` in the package is not possible, because this module has the same name.)
if TYPE_CHECKING:
    from kl_lens.model import LoadedModel
    from kl_lens.model.streaming import TensorSource
    from kl_lens.run.records import ExportedTensor
    from kl_lens.targets.gguf.writer import TensorJob
    from kl_lens.weights.store import Statistics, WeightStore

PART_BYTES = 50 * 10**9  # the largest file that the Hugging Face hub takes


def export(
    model: LoadedModel | Path | str,
    plan: Plan,
    folder: Path | str,
    *,
    fallback: bool = True,
    include_tokenizer: bool = True,
    tokenizer: Any | None = None,
    part_bytes: int = PART_BYTES,
    fingerprint: str | None = None,
    statistics: Statistics | None = None,
    weights_folder: Path | None = None,
) -> Artifact:
    """Writes the file to `folder`, named by llama.cpp's convention; returns a record of every component.

    Args:
        model: an opened model, or a checkpoint folder. A folder is streamed: one tensor at a time is read,
            quantized and written, whatever the size of the checkpoint.
        plan: component → format; components that are not named stay FP16.
        folder: where to write; created if missing.
        fallback: if a format does not fit (columns that do not divide into blocks), store what llama.cpp would
            store and record it. False: raise an error.
        include_tokenizer: False writes a file that works with token ids only.
        tokenizer: a Hugging Face tokenizer to use instead of the model's own.
        part_bytes: files with more bytes of weights than this are split; llama.cpp opens them by the first part.
        fingerprint: recorded as the model's, if the caller knows it (a streamed folder has none).
        statistics, weights_folder: for a streamed folder: calibration statistics for learnt recipes, and where to
            keep weights that are expensive to quantize. An opened model has its own.

    Raises:
        TargetError, PlanError, FormatError: one line; nothing is left behind.
    """
    from kl_lens.model import LoadedModel, load_tokenizer
    from kl_lens.model.streaming import CheckpointTensors, ModelTensors
    from kl_lens.targets.gguf.folder import read_configuration
    from kl_lens.weights.store import WeightStore

    tensors: TensorSource
    if isinstance(model, LoadedModel):
        config, name, source = model.config, model.name, model.folder
        store = model.weights
        streamed = model.residency is not None
        tensors = CheckpointTensors.fitting(model.folder, config) if streamed else ModelTensors(model.model)
        own_tokenizer = model.tokenizer
        fingerprint = fingerprint or model.fingerprint
    else:
        source = Path(model)
        config, name = read_configuration(source), source.resolve().name
        tensors = CheckpointTensors.fitting(source, config)
        store = WeightStore(tensors, statistics, weights_folder, memory_budget=0)
        own_tokenizer = (
            load_tokenizer(source, None, False) if include_tokenizer and tokenizer is None else None
        )
    try:
        return export_weights(
            tensors,
            store,
            config,
            plan,
            Path(folder),
            name=name,
            checkpoint=source,
            fallback=fallback,
            tokenizer=(tokenizer or own_tokenizer) if include_tokenizer else None,
            part_bytes=part_bytes,
            fingerprint=fingerprint or "",
        )
    finally:
        tensors.close()


def uniform_plan(folder: Path | str, format_name: str) -> Plan:
    """One format for every component of a checkpoint that llama.cpp can hold in it, without loading the weights."""
    from kl_lens.model.anatomy import component_name
    from kl_lens.model.streaming import CheckpointTensors
    from kl_lens.targets.gguf.architectures import get_architecture
    from kl_lens.targets.gguf.folder import read_configuration

    source = Path(folder)
    config = read_configuration(source)
    architecture = get_architecture(config.model_type)
    architecture.require(config)
    shapes = CheckpointTensors.fitting(source, config).shapes
    chosen = {
        component_name(rule.parameter, len(shapes[rule.parameter])): format_name
        for rule in architecture.tensors(config, shapes)
        if rule.parameter is not None and not rule.float32 and len(shapes[rule.parameter]) >= 2
    }
    assignment = {} if format_name in (FP16, "f16") else chosen
    name = f"uniform_{format_name.replace('+', '.')}"
    return Plan(name=name, assignment=assignment, made_by="one format for everything")


def export_weights(
    tensors: TensorSource,
    store: WeightStore,
    config: Any,
    plan: Plan,
    folder: Path,
    *,
    name: str,
    checkpoint: Path | None = None,
    fallback: bool = True,
    tokenizer: Any | None = None,
    part_bytes: int = PART_BYTES,
    fingerprint: str = "",
) -> Artifact:
    """`export` for weights from anywhere.

    `config` is a transformers configuration; `checkpoint` a folder whose model card and settings the file quotes.
    """
    from kl_lens.targets.gguf.architectures import get_architecture
    from kl_lens.targets.gguf.choices import planned_bytes

    architecture = get_architecture(config.model_type)
    header, decided = _prepared(
        tensors, config, plan, name, checkpoint, fallback, tokenizer, part_bytes, fingerprint
    )
    text = header.tokenizer
    jobs = header.jobs
    learnt = store.learnt_by((job.recipe for job in jobs if job.recipe is not None), plan.statistics)
    files, digests = write_files(folder, header, tensors, store)
    records = tuple(
        replace(record, digest=digests[record.runtime_name][0], weights=digests[record.runtime_name][1])
        for _, record in decided
    )
    return Artifact(
        target="gguf",
        plan=plan.name,
        files=tuple(path.name for path in files),
        tensors=records,
        planned_bytes=sum(planned_bytes(record.planned, job.shape) for job, record in decided),
        realised_bytes=sum(path.stat().st_size for path in files),
        model=name,
        model_fingerprint=fingerprint,
        settings={
            "architecture": architecture.name(config),
            "tokenizer": text.pre if text else "none",
            "tensor_bytes": sum(job.bytes for job in jobs),
            "fallbacks": sum(1 for record in records if record.realised not in (record.planned, FLOAT32)),
            **({TOKENIZER_CHECK: text.check} if text else {}),
            "notes": [*architecture.notes(config), *(text.notes if text else ())],
            **({"statistics": learnt} if learnt else {}),
        },
    )


def _prepared(
    tensors: TensorSource,
    config: Any,
    plan: Plan,
    name: str,
    checkpoint: Path | None,
    fallback: bool,
    tokenizer: Any | None,
    part_bytes: int,
    fingerprint: str,
) -> tuple[Header, list[tuple[TensorJob, ExportedTensor]]]:
    """Everything about a file that is known before reading weights."""
    from kl_lens.targets.gguf.architectures import check_complete, get_architecture
    from kl_lens.targets.gguf.choices import choose_recipes, decide

    architecture = get_architecture(config.model_type)
    architecture.require(config)
    rules = architecture.tensors(config, tensors.shapes)
    check_complete(rules, tensors.shapes)
    assignment = choose_recipes(plan, tensors)
    decided = [decide(rule, tensors.shapes, assignment, fallback) for rule in rules]
    decided.sort(key=lambda item: tensors.place(item[0].rule.parameter) if item[0].rule.parameter else 0)
    jobs = [job for job, _ in decided]
    vocabulary = next(job.shape[0] for job in jobs if job.rule.name == "token_embd.weight")
    metadata = {
        "kl_lens.version": __version__,
        "kl_lens.plan": plan.name,
        "kl_lens.model_fingerprint": fingerprint,
        **{f".{key}": value for key, value in architecture.metadata(config).items()},
        ".vocab_size": vocabulary,
    }
    text = tokenizer_data(tokenizer, vocabulary, end_tokens(checkpoint)) if tokenizer is not None else None
    general = general_metadata(checkpoint, name, parameter_counts(jobs))
    file = file_name(general, plan, jobs)
    return Header(architecture.name(config), metadata, general, text, jobs, file, part_bytes), decided


def file_bytes(model: LoadedModel, plan: Plan) -> int:
    """The exact size of the file that `export` would write for an opened model, without quantizing anything."""
    from kl_lens.model.streaming import ModelTensors

    tensors = ModelTensors(model.model)
    try:
        header, _ = _prepared(
            tensors, model.config, plan, model.name, model.folder, True, model.tokenizer, PART_BYTES,
            model.fingerprint,
        )  # fmt: skip
        return size_on_disk(header)
    finally:
        tensors.close()
