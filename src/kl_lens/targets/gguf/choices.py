"""Which GGUF format every tensor gets: what the plan says, checked, or what stands in where that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from kl_lens.errors import FormatError, PlanError
from kl_lens.formats import get_format, resolve
from kl_lens.records import ExportedTensor, Plan
from kl_lens.targets.gguf.architectures import TensorRule
from kl_lens.targets.gguf.export import ALIASES, DEFAULT_MAP, FORMATS, STAND_INS
from kl_lens.targets.gguf.weights import WeightSource, component_name
from kl_lens.targets.gguf.writer import FLOAT32, TensorJob


def choose_formats(plan: Plan, weights: WeightSource, format_map: Mapping[str, str]) -> dict[str, str]:
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


def decide(
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


def planned_bytes(planned: str, shape: tuple[int, ...]) -> int:
    """What the plan hoped for; where its format cannot hold the shape at all, FP16."""
    if planned == FLOAT32:
        return 4 * math.prod(shape)
    fmt = get_format(planned)
    return 2 * math.prod(shape) if fmt.fits(shape) else fmt.bytes(shape)
