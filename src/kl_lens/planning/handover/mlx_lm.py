"""mlx-lm: bits and group size of each layer, for a `quant_predicate`. MLX stores a scale and an offset per group."""

from __future__ import annotations

from pathlib import Path

from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.planning.handover.base import (
    Handover,
    Settings,
    as_json,
    components,
    grouped,
    own_rounding,
    refusal,
)
from kl_lens.run.records import Plan
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.integer import GroupedFormat
from kl_lens.weights.formats.microscaling import MicroscalingFormat
from kl_lens.weights.formats.normal_float import NormalFloatFormat
from kl_lens.weights.recipes import FP16

FILE = "quantization.json"
GROUPS = (32, 64, 128)
# A layer that mlx-lm does not ask about stays in the dictionary.
_USE = """import json
from mlx_lm import convert
layers = json.load(open("FOLDER/quantization.json"))
convert(MODEL, OUT, quantize=True, q_group_size=32, quant_predicate=lambda path, *_: layers.pop(path, False))
assert not layers, layers"""
# Families whose layers mlx-lm calls by other names: (ours, theirs).
_PREFIXES = {"nemotron_h": ("model.", "backbone.")}


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> Handover:
    ours, theirs = _PREFIXES.get(model.config.model_type, ("", ""))
    chosen = {}
    for component, recipe in components(model, plan):
        if recipe == FP16:
            continue
        if len(component.shape) != 2 or component.weight != f"{component.name}.weight":
            why = f"KL Lens does not know mlx-lm's name of it; give it fp16, not {recipe}, in the plan's file"
            raise refusal("mlx-lm", plan, component.name, why)
        name = theirs + component.name.removeprefix(ours)
        chosen[name] = grouped("mlx-lm", plan, component.name, recipe, _settings)
    (folder / FILE).write_text(as_json(chosen), encoding="utf-8")
    return Handover(_USE, notes=own_rounding("mlx-lm", plan))


def _settings(fmt: Format) -> Settings | None:
    uneven = (NormalFloatFormat, MicroscalingFormat)
    is_linear = isinstance(fmt, GroupedFormat) and not isinstance(fmt, uneven)
    if not is_linear or fmt.group_size not in GROUPS:
        return None
    return {"bits": fmt.bits, "group_size": fmt.group_size}
