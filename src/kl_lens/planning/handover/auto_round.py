"""AutoRound: its `layer_config`, from layer to bits and group size. Layers that are not in the plan stay in 16 bits."""

from __future__ import annotations

from pathlib import Path

from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.planning.handover.base import (
    Handover,
    Settings,
    as_json,
    components,
    is_integer,
    layers,
    own_rounding,
    refusal,
)
from kl_lens.run.records import Plan
from kl_lens.weights.formats import Format

FILE, BLOCK = "layer_config.json", 32
_USE = """import json
from auto_round import AutoRound
layers = json.load(open("FOLDER/layer_config.json"))
AutoRound(MODEL, scheme="W4A16", layer_config=layers).quantize_and_save(OUT, format="auto_round")"""


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> Handover:
    quantized = layers("AutoRound", model, plan, _settings)
    for component, _ in components(model, plan):
        if component.name in quantized and any(size % BLOCK for size in component.shape):
            why = f"its shape {component.shape} does not divide by {BLOCK}, so AutoRound would leave it alone"
            raise refusal("AutoRound", plan, component.name, f"{why}; give it fp16 in the plan's file")
    # Layers that are not named would get the scheme's 4 bits.
    every = {
        c.name: quantized.get(c.name, {"bits": 16})
        for c, _ in components(model, plan)
        if c.kind != "embedding"
    }
    (folder / FILE).write_text(as_json(every), encoding="utf-8")
    return Handover(_USE, notes=own_rounding("AutoRound", plan))


def _settings(fmt: Format) -> Settings | None:
    if not is_integer(fmt):
        return None
    return {"bits": fmt.bits, "group_size": fmt.group_size or -1, "sym": fmt.symmetric, "data_type": "int"}
