"""Plans in the languages of other tools, for those who quantize with an exporter of their own.

A tool gets the format of every component. How values are rounded is its own affair; only llama.cpp takes our statistics
too. To add a tool, write a `Tool` and name it in `TOOLS`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kl_lens.base.errors import PlanError, UnlearntError
from kl_lens.base.files import replacing
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.run.records import Component, Plan
from kl_lens.targets.gguf.export import tensor_jobs
from kl_lens.targets.gguf.writer import FLOAT32, ModelTensors, TensorJob
from kl_lens.weights.formats import Format
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.formats.integer import GROUPS, SignedScaleFormat, ZeroPointFormat
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.quantizers.methods import column_importance
from kl_lens.weights.recipes import FP16, NEAREST, Recipe, parsed

Settings = dict[str, Any]


@dataclass(frozen=True)
class Handover:
    """What was written for a tool."""

    use: str  # a command or a few lines of Python
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool that reads one file."""

    title: str
    file: str
    use: str  # FOLDER stands for the folder of the file
    # Of a format; None: the tool does not have it.
    settings: Callable[[Format], Settings | None]
    # From each component's settings, without FP16 ones.
    content: Callable[[LoadedModel, Plan, Mapping[str, Settings]], str]
    # Why a component must stay at FP16.
    refuses: Callable[[Component], str | None] = lambda component: None


def write_recipe(
    name: str,
    model: LoadedModel,
    plan: Plan,
    folder: Path,
    statistics: StoredStatistics | None = None,
) -> Handover:
    """Writes a plan for a tool. Raises PlanError, which names the component, if the tool has no words for it.

    `statistics`: of the run, for tools that weigh columns by importance.
    """
    tool = TOOLS[name]
    shared = [NEAREST]
    with replacing(folder) as new:
        if tool is None:
            title = "llama-quantize"
            shared.append("imatrix")
            use = _write_for_llama_cpp(model, plan, new, statistics)
        else:
            title = tool.title
            use = tool.use
            content = tool.content(model, plan, _chosen(tool, model, plan))
            (new / tool.file).write_text(content, encoding="utf-8")
        files = tuple(folder / path.name for path in sorted(new.iterdir()))
    methods = [recipe.method for recipe in parsed(plan.assignment).values()]
    foreign = [method for method in methods if method not in shared]
    note = (
        f"{plan.name}: {len(foreign)} components were measured with {', '.join(sorted(set(foreign)))}; {title} rounds "
        "in its own way, so measure its file"
    )
    use = use.replace("FOLDER", str(folder))
    return Handover(use, files, (note,) if foreign else ())


def _chosen(tool: Tool, model: LoadedModel, plan: Plan) -> dict[str, Settings]:
    recipes = parsed(plan.assignment)
    chosen = {}
    for component in model.anatomy.candidates:
        if (recipe := recipes.get(component.name, FP16)) == FP16:
            continue
        settings = tool.settings(recipe.grid)
        reason = f"it has nothing like {recipe.grid.name}" if settings is None else None
        if refusal := tool.refuses(component):
            reason = f"{refusal}; give it fp16, not {recipe}, in the plan's file"
        if settings is None or reason:
            raise PlanError(
                f"{tool.title} cannot express plan {plan.name}: {component.name}: {reason}"
            )
        chosen[component.name] = settings
    return chosen


# NNCF takes no map from layer to format. A pass of `compress_weights` with ratio 1 compresses everything but its
# ignored scope, and leaves alone what an earlier pass has compressed. The file finds the operations of each weight in
# the graph by the weight's PyTorch name, which OpenVINO's converter keeps, and checks the types afterwards.
_NNCF_SCRIPT = '''"""Compresses the weights of an OpenVINO model as planned. Made by KL Lens from plan {plan}."""

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


def _nncf_settings(fmt: Format) -> Settings | None:
    size = fmt.group_size or -1
    if isinstance(fmt, NormalFloatFormat):
        return {"mode": "nf4", "group_size": size, "type": "nf4"}
    if isinstance(fmt, MicroscalingFormat):
        return {"mode": "mxfp4", "group_size": size, "type": "f4e2m1"}
    is_integer = isinstance(fmt, SignedScaleFormat | ZeroPointFormat)
    if not is_integer or (fmt.bits, size > 0) not in ((4, True), (4, False), (8, False)):
        return None
    mode = f"int{fmt.bits}_{'sym' if fmt.symmetric else 'asym'}"
    letter = "i" if fmt.symmetric else "u"
    return {"mode": mode, "group_size": size, "type": f"{letter}{fmt.bits}"}


def _nncf_content(model: LoadedModel, plan: Plan, chosen: Mapping[str, Settings]) -> str:
    passes: dict[str, Settings] = {}
    for name, settings in chosen.items():
        step = passes.setdefault(repr(settings), settings | {"weights": []})
        step["weights"].append(model.anatomy.component(name).weight)
    text = json.dumps(list(passes.values()), indent=4)
    return _NNCF_SCRIPT.format(plan=plan.name, passes=text)


_NNCF = Tool(
    "NNCF",
    "nncf_recipe.py",
    """import sys
import openvino
sys.path.append("FOLDER")
from nncf_recipe import compress
openvino.save_model(compress(openvino.Core().read_model(MODEL_XML)), OUT_XML)""",
    _nncf_settings,
    _nncf_content,
)


def _mlx_settings(fmt: Format) -> Settings | None:
    """MLX stores a scale and an offset per group."""
    if fmt.group_size not in GROUPS or not isinstance(
        fmt, SignedScaleFormat | ZeroPointFormat | AffineFormat
    ):
        return None
    return {"bits": fmt.bits, "group_size": fmt.group_size}


def _mlx_refuses(component: Component) -> str | None:
    if len(component.shape) == 2 and component.weight == f"{component.name}.weight":
        return None
    return "KL Lens does not know mlx-lm's name of it"


def _mlx_content(model: LoadedModel, plan: Plan, chosen: Mapping[str, Settings]) -> str:
    if model.config.model_type == "nemotron_h":  # whose layers mlx-lm calls otherwise
        chosen = {
            f"backbone.{name.removeprefix('model.')}": settings
            for name, settings in chosen.items()
        }
    return json.dumps(chosen, indent=1) + "\n"


_MLX_LM = Tool(
    "mlx-lm",
    "quantization.json",
    # A layer that mlx-lm does not ask about stays in the dictionary.
    """import json
from mlx_lm import convert
layers = json.load(open("FOLDER/quantization.json"))
convert(MODEL, OUT, quantize=True, q_group_size=32, quant_predicate=lambda path, *_: layers.pop(path, False))
assert not layers, layers""",
    _mlx_settings,
    _mlx_content,
    _mlx_refuses,
)

# In the order in which they are listed for users. llama.cpp's files are made by a function of their own.
TOOLS: dict[str, Tool | None] = {
    "llama.cpp": None,
    "nncf": _NNCF,
    "mlx-lm": _MLX_LM,
}


TYPES = "tensor-types.txt"
IMPORTANCE = "imatrix.gguf"
_SPELLED = {FP16: "f16", FLOAT32: "f32"}
# Parts of names that `llama-quantize` never quantizes.
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight")


def _write_for_llama_cpp(
    model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None
) -> str:
    """A file for `llama-quantize --tensor-type-file`, and the importance matrix for `--imatrix`; returns the command.

    The matrix has only the tensors whose recipe learns. So `llama-quantize` rounds the others plainly, as they were
    measured.
    """
    jobs = _jobs(model, plan)
    # Names are regular expressions that are searched for: without ^ and $, `output` would also match `ffn_output`.
    lines = (
        f"^{re.escape(job.rule.name)}$={_SPELLED.get(job.format, job.format)}\n"
        for job in jobs
    )
    (folder / TYPES).write_text("".join(lines), encoding="utf-8")

    def learns(recipe: Recipe) -> bool:
        return recipe.quantizer.learns or (recipe.is_tuned and statistics is not None)

    learning = [job for job in jobs if job.recipe and learns(job.recipe)]
    if learning:
        if statistics is None:
            raise UnlearntError(
                f"plan {plan.name}: {learning[0].component}: {learning[0].recipe} needs an importance matrix, and the "
                "run has no statistics; gather them with kl-lens calibrate"
            )
        recipes = (job.recipe for job in learning if job.recipe)
        model.weights.learnt_by(recipes, plan.statistics)
        _write_importance(folder / IMPORTANCE, learning, statistics, model.chain.device)
    sizes = Counter[str]()
    for job in jobs:
        if job.format not in _SPELLED:
            sizes[job.format] += job.bytes
    most = sizes.most_common(1)[0][0].upper() if sizes else "F16"
    weighed = f"--imatrix FOLDER/{IMPORTANCE} " if learning else ""
    return f"llama-quantize {weighed}--tensor-type-file FOLDER/{TYPES} MODEL-F16.gguf MODEL-{plan.name}.gguf {most}"


def _jobs(model: LoadedModel, plan: Plan) -> list[TensorJob]:
    """The matrices of the GGUF file whose type `llama-quantize` chooses."""
    jobs = tensor_jobs(model, ModelTensors(model), plan, fallback=False)
    chosen = []
    for job in jobs:
        if any(part in job.rule.name for part in _KEPT):
            if job.format not in _SPELLED:
                raise PlanError(
                    f"llama.cpp cannot express plan {plan.name}: {job.component}: llama-quantize never quantizes "
                    f"{job.rule.name}; give it fp16 in the plan's file"
                )
        elif len(job.shape) >= 2 and job.rule.name.endswith("weight"):
            chosen.append(job)
    return chosen


def _write_importance(
    path: Path, jobs: list[TensorJob], statistics: StoredStatistics, device: torch.device
) -> None:
    """In the format of `llama-imatrix`: for each tensor the sum of x² per column and the number of inputs."""
    text = statistics.identity["text"]
    writer = gguf_module().GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [str(text["source"])])
    writer.add_uint32("imatrix.chunk_count", int(text["windows"]))
    writer.add_uint32("imatrix.chunk_size", int(text["length"]))
    for job in jobs:
        inputs = statistics.of(job.component, device)
        moments = inputs.second_moments.view(-1, *inputs.second_moments.shape[-2:])
        importance = torch.stack([column_importance(matrix) for matrix in moments]).cpu()
        if job.rule.columns != (1, 1):
            grouped = importance.unflatten(-1, (*job.rule.columns, -1))
            importance = grouped.transpose(-3, -2).flatten(-3)
        counts = torch.tensor(inputs.tokens, dtype=torch.float32).clamp_min(1)
        counts = counts.expand(len(moments))[:, None].contiguous()
        writer.add_tensor(f"{job.rule.name}.in_sum2", (importance * counts).numpy())
        writer.add_tensor(f"{job.rule.name}.counts", counts.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
