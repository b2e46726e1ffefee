"""A model and a plan become one GGUF file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from kl_lens.checkpoints import LoadedModel, mamba_ssm
from kl_lens.checkpoints.files import read_config
from kl_lens.errors import FormatError, PlanError, TargetError
from kl_lens.formats import get_format, resolve
from kl_lens.records import Artifact, ExportedTensor, Plan
from kl_lens.targets.gguf.architectures import TensorRule, check_complete, get_architecture
from kl_lens.targets.gguf.tokenizer import tokenizer_data
from kl_lens.targets.gguf.weights import CheckpointWeights, ModelWeights, WeightSource, component_name
from kl_lens.targets.gguf.writer import FLOAT32, TensorJob, write_file
from kl_lens.version import __version__

FORMATS = ("fp16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")  # what a plan for this target may ask for
STAND_INS = (*FORMATS, "q5_0", "q5_1", FLOAT32)  # and what else may be in a file: fallbacks, exact copies
ALIASES = {"f16": "fp16", "f32": FLOAT32}  # llama.cpp's own spelling
# What the OpenVINO formats of the paper's plans become. Other numbers: measure again.
DEFAULT_MAP = {"int8": "q8_0", "int4": "q4_0"}


def export(
    model: LoadedModel | Path | str,
    plan: Plan,
    folder: Path | str,
    *,
    fallback: bool = True,
    format_map: Mapping[str, str] | None = None,
    include_tokenizer: bool = True,
    tokenizer: Any | None = None,
    file_name: str | None = None,
    fingerprint: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """Writes `folder/NAME-PLAN.gguf` and says what became of every component.

    Args:
        model: an opened model, or a checkpoint folder. A folder is streamed: one tensor at a time is read,
            quantized and written, whatever the size of the checkpoint.
        plan: component → format; components that are not named stay FP16.
        folder: where to write; made when it is not there.
        fallback: where a format does not fit (columns that do not divide into blocks), store what llama.cpp would
            store and record it. False: refuse instead.
        format_map: formats of the plan to replace, such as `DEFAULT_MAP`. KL measured for one format is not KL
            of another: measure the artifact again.
        include_tokenizer: False writes a file that works with token ids only.
        tokenizer: a Hugging Face tokenizer to use instead of the model's own.
        file_name: another name for the file.
        fingerprint: recorded as the model's, where the caller knows it (a streamed folder has none of its own).
        progress: called with (bytes written, bytes in all).

    Raises:
        TargetError, PlanError, FormatError: one line; nothing is left behind.
    """
    if isinstance(model, LoadedModel):
        config, name = model.config, model.name
        weights: WeightSource = ModelWeights(model.model)
        own_tokenizer = model.tokenizer
        fingerprint = fingerprint or model.fingerprint
    else:
        source = Path(model)
        config, name = _config(source), source.resolve().name
        weights = CheckpointWeights(source, config)
        own_tokenizer = _tokenizer(source) if include_tokenizer and tokenizer is None else None
    try:
        return export_weights(
            weights,
            config,
            plan,
            Path(folder) / (file_name or f"{_safe(name)}-{_safe(plan.name)}.gguf"),
            name=name,
            fallback=fallback,
            format_map=format_map,
            tokenizer=(tokenizer or own_tokenizer) if include_tokenizer else None,
            fingerprint=fingerprint or "",
            progress=progress,
        )
    finally:
        weights.close()


def uniform_plan(folder: Path | str, format_name: str) -> Plan:
    """One format for every component of a checkpoint that llama.cpp can hold in it, without loading the weights."""
    source = Path(folder)
    config = _config(source)
    architecture = get_architecture(config.model_type)
    architecture.require(config)
    shapes = CheckpointWeights(source, config).shapes
    chosen = {
        component_name(rule.parameter, len(shapes[rule.parameter])): format_name
        for rule in architecture.tensors(config, shapes)
        if rule.parameter is not None and not rule.float32 and len(shapes[rule.parameter]) >= 2
    }
    assignment = {} if format_name in ("fp16", "f16") else chosen
    return Plan(name=f"uniform_{format_name}", assignment=assignment, made_by="one format for everything")


def export_weights(
    weights: WeightSource,
    config: Any,
    plan: Plan,
    path: Path,
    *,
    name: str,
    fallback: bool = True,
    format_map: Mapping[str, str] | None = None,
    tokenizer: Any | None = None,
    fingerprint: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Artifact:
    """`export` for weights from anywhere; `config` is a transformers configuration."""
    architecture = get_architecture(config.model_type)
    architecture.require(config)
    rules = architecture.tensors(config, weights.shapes)
    check_complete(rules, weights.shapes)
    assignment = _assignment(plan, weights, format_map or {})
    decided = [_decide(rule, weights.shapes, assignment, fallback) for rule in rules]
    decided.sort(key=lambda item: weights.place(item[0].rule.parameter) if item[0].rule.parameter else 0)
    jobs = [job for job, _ in decided]
    records = tuple(record for _, record in decided)

    vocabulary = next(job.shape[0] for job in jobs if job.rule.name == "token_embd.weight")
    text = tokenizer_data(tokenizer, vocabulary) if tokenizer is not None else None
    metadata = {
        "general.name": name,
        "kl_lens.version": __version__,
        "kl_lens.plan": plan.name,
        "kl_lens.model_fingerprint": fingerprint,
        **{f".{key}": value for key, value in architecture.metadata(config).items()},
        ".vocab_size": vocabulary,
    }
    write_file(path, architecture.name(config), metadata, text, jobs, weights, progress)
    return Artifact(
        target="gguf",
        plan=plan.name,
        files=(path.name,),
        tensors=records,
        planned_bytes=sum(_planned_bytes(record.planned, job.shape) for job, record in decided),
        realised_bytes=path.stat().st_size,
        model=name,
        model_fingerprint=fingerprint,
        settings={
            "architecture": architecture.name(config),
            "tokenizer": text.pre if text else "none",
            "tensor_bytes": sum(job.bytes for job in jobs),
            "fallbacks": sum(1 for record in records if record.realised not in (record.planned, FLOAT32)),
            "format_map": dict(format_map or {}),
            "notes": [*architecture.notes(config), *(text.notes if text else ())],
        },
    )


def _config(folder: Path) -> Any:
    raw = read_config(folder)
    if mamba_ssm.is_layout(raw):
        version2 = (raw.get("ssm_cfg") or {}).get("layer", "Mamba1") == "Mamba2"
        return mamba_ssm.mamba2_config(raw) if version2 else mamba_ssm.mamba1_config(raw)
    get_architecture(str(raw.get("model_type")))  # a clear refusal before transformers looks at it
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def _tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _assignment(plan: Plan, weights: WeightSource, format_map: Mapping[str, str]) -> dict[str, str]:
    """Component → GGUF format, checked: known components, known formats, one format per tied weight."""
    shapes = weights.shapes
    components = {component_name(name, len(shape)) for name, shape in shapes.items()}
    tied = {
        component_name(alias, len(shapes[first])): component_name(first, len(shapes[first]))
        for alias, first in weights.aliases.items()
    }
    unknown = sorted(set(plan.assignment) - components - set(tied))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise PlanError(f"plan {plan.name}: the model has no component {', '.join(unknown[:3])}{more}")
    chosen: dict[str, str] = {}
    for component, planned in plan.assignment.items():
        wanted = format_map.get(planned, planned)
        wanted = ALIASES.get(wanted, wanted)
        if wanted not in STAND_INS:
            hint = "; map int8 → q8_0 and int4 → q4_0 with --map" if planned in DEFAULT_MAP else ""
            raise PlanError(
                f"plan {plan.name}: GGUF has no format {wanted!r} ({component}); it has {', '.join(FORMATS)}{hint}"
            )
        name = tied.get(component, component)
        if chosen.setdefault(name, wanted) != wanted:
            raise PlanError(f"plan {plan.name}: {component} is {name}, and the plan gives them two formats")
    return chosen


def _decide(
    rule: TensorRule, shapes: Mapping[str, tuple[int, ...]], assignment: Mapping[str, str], fallback: bool
) -> tuple[TensorJob, ExportedTensor]:
    """The format a tensor gets, and the record that says so."""
    if rule.parameter is None:
        assert rule.shape is not None
        shape, component = rule.shape, rule.name
    else:
        source = shapes[rule.parameter]
        shape = tuple(rule.transform(torch.empty(source, device="meta")).shape)
        component = component_name(rule.parameter, len(source))
    planned = assignment.get(component, "fp16")
    if rule.float32:
        realised, reason = FLOAT32, "llama.cpp computes with it in F32"
        refused = component in assignment and planned not in ("fp16", FLOAT32)
    elif planned == FLOAT32:
        realised, reason, refused = FLOAT32, "", False
    else:
        fmt, reason_or_none = resolve(get_format(planned), shape)
        realised, reason = fmt.name, reason_or_none or ""
        refused = reason_or_none is not None
    if refused and not fallback:
        raise FormatError(
            f"{component}: {planned} is not possible: {reason}; allow fallbacks or change the plan"
        )
    job = TensorJob(rule, shape, realised)
    return job, ExportedTensor(component, rule.name, planned, realised, job.bytes, reason or None)


def _planned_bytes(planned: str, shape: tuple[int, ...]) -> int:
    """What the plan hoped for; where its format cannot hold the shape at all, FP16."""
    if planned == FLOAT32:
        return 4 * math.prod(shape)
    fmt = get_format(planned)
    return 2 * math.prod(shape) if fmt.fits(shape) else fmt.bytes(shape)


def _safe(name: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    if not cleaned:
        raise TargetError(f"{name!r} makes no file name; pass file_name")
    return cleaned
