"""NNCF: a Python file with one pass of `compress_weights` for each mode and group size.

NNCF takes no map from layer to format. A pass with ratio 1 compresses everything but its ignored scope, and leaves
alone what an earlier pass has compressed. The file finds the operations of each weight in the graph by the weight's
PyTorch name, which OpenVINO's converter keeps, and raises an error if one is not there or has the wrong type.
"""

from __future__ import annotations

import json
from pathlib import Path

from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.planning.handover.base import Handover, Settings, components, grouped, is_integer, own_rounding
from kl_lens.run.records import Plan
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.microscaling import MicroscalingFormat
from kl_lens.weights.formats.normal_float import NormalFloatFormat
from kl_lens.weights.recipes import FP16

FILE = "nncf_recipe.py"
_USE = """import sys
import openvino
sys.path.append("FOLDER")
from nncf_recipe import compress
openvino.save_model(compress(openvino.Core().read_model(MODEL_XML)), OUT_XML)"""
_SCRIPT = '''"""Compresses the weights of an OpenVINO model as planned. Made by KL Lens from plan {plan}."""

import nncf

# Each pass: NNCF's mode and group size, the type that the weights then have, and the weights by their PyTorch names.
PASSES = {passes}


PASSING = ("Convert", "Reshape", "Transpose", "Unsqueeze", "Squeeze")  # between a weight and its product


def _constants(model):
    """Weight -> its constant. Converters put `self.` or `self.model.` before the PyTorch name, or nothing."""
    names = {{weight for each in PASSES for weight in each["weights"]}}
    found = {{}}
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            parts = node.get_friendly_name().split(".")
            for start in range(len(parts)):
                if (name := ".".join(parts[start:])) in names:
                    found[name] = node
    if missing := sorted(names - set(found)):
        raise ValueError(f"{{missing[0]}}: no constant of this model has that name; {{len(missing)}} are missing")
    return found


def _operations(constant):
    """The names of the operations that multiply by a weight or look rows up in it."""
    waiting, names = [constant], []
    while waiting:
        for reader in waiting.pop().output(0).get_target_inputs():
            node = reader.get_node()
            if node.get_type_name() in PASSING:
                waiting.append(node)
            else:
                names.append(node.get_friendly_name())
    return names


def compress(model):
    for each in PASSES:
        constants = _constants(model)
        wanted = {{name for weight in each["weights"] for name in _operations(constants[weight])}}
        nodes = [node for node in model.get_ops() if node.get_type_name() not in ("Constant", *PASSING)]
        others = [name for node in nodes if (name := node.get_friendly_name()) not in wanted]
        ignored = nncf.IgnoredScope(names=others, validate=False)
        how = {{"ratio": 1.0, "group_size": each["group_size"], "all_layers": True}}
        how["backup_mode"] = nncf.BackupMode.NONE
        if each["mode"].startswith("int8"):
            how = {{}}
        model = nncf.compress_weights(
            model, mode=nncf.CompressWeightsMode(each["mode"]), ignored_scope=ignored, **how
        )
    constants = _constants(model)
    for each in PASSES:
        for weight in each["weights"]:
            if (found := constants[weight].get_element_type().get_type_name()) != each["type"]:
                raise ValueError(f"{{weight}} is {{found}} after compressing, not {{each['type']}}")
    return model
'''


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> Handover:
    passes: dict[str, Settings] = {}
    for component, recipe in components(model, plan):
        if recipe != FP16:
            how = grouped("NNCF", plan, component.name, recipe, _settings)
            passes.setdefault(recipe.grid.name, how | {"weights": []})["weights"].append(component.weight)
    content = _SCRIPT.format(plan=plan.name, passes=json.dumps(list(passes.values()), indent=4))
    (folder / FILE).write_text(content, encoding="utf-8")
    return Handover(_USE, notes=own_rounding("NNCF", plan))


def _settings(fmt: Format) -> Settings | None:
    size = fmt.group_size or -1
    if isinstance(fmt, NormalFloatFormat):
        return {"mode": "nf4", "group_size": size, "type": "nf4"}
    if isinstance(fmt, MicroscalingFormat):
        return {"mode": "mxfp4", "group_size": size, "type": "f4e2m1"}
    if not is_integer(fmt) or fmt.bits == 2 or (fmt.bits == 8 and fmt.group_size):
        return None
    kind, letter = ("sym", "i") if fmt.symmetric else ("asym", "u")
    return {"mode": f"int{fmt.bits}_{kind}", "group_size": size, "type": f"{letter}{fmt.bits}"}
