"""Writes a GGUF file from a model and a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.base.version import __version__
from kl_lens.model import LoadedModel
from kl_lens.model.anatomy import component_name
from kl_lens.model.files import and_more
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.exporting import record
from kl_lens.targets.gguf.architectures.base import Shapes, TensorRule, check_complete
from kl_lens.targets.gguf.template import Template, architecture_of
from kl_lens.targets.gguf.tokenizer import TOKENIZER_CHECK, tokenizer_data
from kl_lens.targets.gguf.writer import (
    FLOAT32,
    Header,
    ModelTensors,
    TensorJob,
    file_name,
    general_metadata,
    parameter_counts,
    size_on_disk,
    write_files,
)
from kl_lens.targets.tokenizer import end_ids
from kl_lens.weights.formats import known_formats
from kl_lens.weights.formats.ggml_types import ggml_types
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

FURTHER = "q8_0"  # of heads for further tokens, which no plan names
PART_BYTES = 50 * 10**9  # the largest file that the Hugging Face hub takes


def tensor_jobs(
    model: LoadedModel, tensors: ModelTensors, plan: Plan, *, fallback: bool = True
) -> list[TensorJob]:
    """Every tensor of the file with its recipe; without `fallback`, FormatError if one is not the planned."""
    architecture = architecture_of(model)
    shapes = tensors.shapes
    architecture.require(model.config)
    rules = architecture.tensors(model.config, shapes)
    if not isinstance(architecture, Template):  # which is checked
        check_complete(rules, shapes)
    further = further_rules(model)
    recipes = _recipes(model, plan) | {
        component_name(name, len(stored.shape)): Recipe(FURTHER)
        for name, stored in model.further_heads.items()
    }
    parameters = shapes | {
        name: stored.shape for name, stored in model.further_heads.items()
    }
    jobs = []
    for rule in (*rules, *further):
        parts = [
            _decide(part, parameters, recipes, fallback) for part in (rule, *rule.further)
        ]
        jobs.append(_joined(parts) if rule.further else parts[0])
    return jobs


def _joined(parts: list[TensorJob]) -> TensorJob:
    """A tensor has one type: the largest that was planned for a part of it."""
    largest = max(parts, key=lambda part: part.bytes / math.prod(part.shape))
    reason = f"{largest.component} is in the same tensor"
    same = [
        part
        if part.recipe == largest.recipe
        else replace(part, recipe=largest.recipe, reason=reason)
        for part in parts
    ]
    return replace(same[0], shape=same[0].rule.shape, parts=tuple(same))


def further_rules(model: LoadedModel) -> list[TensorRule]:
    """Of heads for further tokens; none unless llama.cpp has a place for every tensor of them."""
    rules = architecture_of(model).further(model.config)
    return rules if {rule.parameter for rule in rules} == set(model.further_heads) else []


def _recipes(model: LoadedModel, plan: Plan) -> dict[str, Recipe | None]:
    """Component → recipe (None: F32). Raises for unknown components or formats, and for tied weights in two formats."""
    owners = {
        name: c.name for c in model.anatomy.components for name in (c.name, *c.tied_with)
    }
    if unknown := sorted(set(plan.assignment) - set(owners)):
        raise PlanError(
            f"plan {plan.name}: the model has no component {unknown[0]}{and_more(unknown)}"
        )
    chosen: dict[str, Recipe | None] = {}
    for component, planned in plan.assignment.items():
        spelling = {"f16": FP16, "f32": FLOAT32}.get(
            planned, planned
        )  # llama.cpp's own spelling
        name = spelling.partition("+")[0]
        if name != FLOAT32 and not is_stored(name):
            raise PlanError(
                f"plan {plan.name}: GGUF has no format {name!r} ({component}); it has "
                f"{', '.join(filter(is_stored, known_formats()))}. Make a "
                "plan for it with: kl-lens plan --target gguf"
            )
        wanted = None if name == FLOAT32 else Recipe.parse(spelling)
        owner = owners[component]
        if chosen.setdefault(owner, wanted) != wanted:
            raise PlanError(
                f"plan {plan.name}: {component} is tied to {owner}, but planned in two formats"
            )
    return chosen


def is_stored(name: str) -> bool:
    """Whether files may hold this format of ours."""
    return name in known_formats() and name in ggml_types()


def fitting(wanted: Recipe, shape: tuple[int, ...]) -> tuple[Recipe, str | None]:
    """What a tensor of this shape gets, and why it is not what was planned (or None)."""
    recipe, reason = fitting_recipe(wanted, shape)
    # Elsewhere, integers take the place of MXFP4.
    return (recipe if is_stored(recipe.grid.name) else FP16), reason


def _decide(
    rule: TensorRule, shapes: Shapes, recipes: Mapping[str, Recipe | None], fallback: bool
) -> TensorJob:
    component = rule.name
    shape: tuple[int, ...] = (len(rule.constant),)
    if rule.parameter is not None:
        source = shapes[rule.parameter]
        shape = tuple(rule.transform(torch.empty(source, device="meta")).shape)
        component = component_name(rule.parameter, len(source))
    if rule.copied is not None:
        return TensorJob(rule, component, rule.copied.shape, None, None, None)
    planned = recipes.get(component, FP16)
    recipe = None
    reason = "llama.cpp computes with it in F32" if rule.float32 else None
    if planned is not None and not rule.float32:
        recipe, reason = fitting(planned, rule.stretch(shape))
    if not fallback and reason and not (rule.float32 and planned in (FP16, None)):
        raise FormatError(
            f"{component}: {planned} is not possible: {reason}; change the plan"
        )
    return TensorJob(rule, component, shape, planned, recipe, reason)


def export(
    model: LoadedModel,
    plan: Plan,
    folder: Path,
    *,
    include_tokenizer: bool = True,
    part_bytes: int = PART_BYTES,
) -> Artifact:
    """Writes the file to `folder`, named by llama.cpp's convention; returns a record of every component.

    One tensor at a time is read, quantized and written, so the weights may stay on disk. Components that the plan does
    not name stay FP16; where a format does not fit, llama.cpp's substitute is stored and recorded.

    Args:
        include_tokenizer: False writes a file that works with token ids only.
        part_bytes: files with more bytes of weights than this are split; llama.cpp opens them by the first part.
    """
    tensors = ModelTensors(model)
    header = _prepared(model, tensors, plan, include_tokenizer, part_bytes)
    # FormatError: the plan was made with other statistics than the model has.
    model.weights.learnt_by(
        (job.recipe for job in header.jobs if job.recipe is not None), plan.statistics
    )
    records = write_files(folder, header, tensors, model.weights)
    text = header.tokenizer
    notes = architecture_of(model).notes(model.config)
    settings: dict[str, Any] = {
        "architecture": header.architecture,
        "tokenizer": header.pre_tokenizer,
        "tensor_bytes": sum(tensor.bytes for tensor in records),
        "further_heads": bool(further_rules(model)),
        "fallbacks": sum(
            1 for tensor in records if tensor.realised not in (tensor.planned, FLOAT32)
        ),
        **({TOKENIZER_CHECK: text.check} if text else {}),
        "notes": [*notes, *(text.notes if text else ())],
    }
    planned = replace(plan, bytes=sum(job.planned_bytes for job in header.jobs))
    return record("gguf", model, planned, folder, records, **settings)


def file_bytes(model: LoadedModel, plan: Plan) -> int:
    """The exact size of the file that `export` would write without quantizing anything."""
    return size_on_disk(_prepared(model, ModelTensors(model), plan, True, PART_BYTES))


def _prepared(
    model: LoadedModel,
    tensors: ModelTensors,
    plan: Plan,
    include_tokenizer: bool,
    part_bytes: int,
) -> Header:
    """Everything about a file that is known before reading weights."""
    config = model.config
    jobs = tensor_jobs(model, tensors, plan)
    vocabulary = next(
        job.shape[0] for job in jobs if job.rule.name == "token_embd.weight"
    )
    architecture = architecture_of(model)
    general = general_metadata(model.folder, model.name, parameter_counts(jobs))
    header = Header(
        architecture.name(config),
        {
            "kl_lens.version": __version__,
            "kl_lens.plan": plan.name,
            "kl_lens.model_fingerprint": model.fingerprint,
        },
        general,
        None,
        jobs,
        file_name(general, plan, jobs),
        part_bytes,
    )
    if isinstance(architecture, Template):
        return architecture.applied(header, with_tokenizer=include_tokenizer)
    metadata = header.metadata | {
        **{f".{key}": value for key, value in architecture.metadata(config).items()},
        ".vocab_size": vocabulary,
    }
    if further_rules(model):
        metadata |= {
            ".nextn_predict_layers": 1,
            ".block_count": metadata[".block_count"] + 1,
        }
    text = None
    if include_tokenizer and model.tokenizer is not None:
        text = tokenizer_data(model.tokenizer, vocabulary, end_ids(model.folder))
    return replace(header, metadata=metadata, tokenizer=text)
