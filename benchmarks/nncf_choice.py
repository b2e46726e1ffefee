"""Which components NNCF's own mixed precision would put at 4 bits, as assignments that our engine can judge.

NNCF ranks layers and fills a `ratio` of the weights with INT4. Each layer's choice is read back from the compressed
model by comparing weights, so that its plan is judged by the same engine, with the same integers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel
from kl_lens.records import SensitivityTable
from kl_lens.text import draw_windows

RATIOS = [i / 10 for i in range(11)]


def nncf_plans(
    model: LoadedModel, table: SensitivityTable, limits: Sequence[int]
) -> dict[str, dict[int, dict[str, str]]]:
    """criterion → limit in bytes → assignment: the least INT4 ratio that fits each limit; none above uniform INT8."""
    inputs = _activations(model, table)
    found: dict[str, dict[int, dict[str, str]]] = {}
    for criterion in ("data-free", "activations"):
        plans = [_choice(model, table, inputs, criterion, ratio) for ratio in RATIOS]
        sizes = [planning.cost_of(table.components, plan).bytes for plan in plans]
        found[criterion] = {}
        for limit in limits:
            if limit > sizes[0]:
                continue
            fitting = [plan for plan, size in zip(plans, sizes, strict=True) if size <= limit]
            if fitting:
                found[criterion][limit] = fitting[0]
    return found


def _activations(model: LoadedModel, table: SensitivityTable) -> dict[str, torch.Tensor]:
    """The inputs of each layer on a little calibration text; dt_proj's input is read from x_proj's output."""
    windows = draw_windows("wikitext2:train", model.require_tokenizer(), windows=2, length=256, seed=42)
    seen: dict[str, torch.Tensor] = {}
    handles = []
    modules = dict(model.model.named_modules())
    for component in table.candidates:
        if len(component.shape) != 2:
            continue
        owner = component.name
        if component.name == table.head or table.head in component.tied_with:
            module: nn.Module = model.chain.head
        else:
            module = modules[owner]
        if isinstance(module, nn.Linear):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, args, name=component.name: seen.__setitem__(
                        name, args[0].flatten(0, -2).clone()
                    )
                )
            )
        parent = modules.get(owner.rpartition(".")[0])
        if component.kind == "dt_proj" and parent is not None:
            rank = component.shape[1]
            handles.append(
                parent.x_proj.register_forward_hook(
                    lambda _m, _a, out, name=component.name, rank=rank: seen.__setitem__(
                        name, out[..., :rank].flatten(0, -2).clone()
                    )
                )
            )
    try:
        model.chain.full_logits(windows.ids)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _choice(
    model: LoadedModel, table: SensitivityTable, inputs: dict[str, torch.Tensor], criterion: str, ratio: float
) -> dict[str, str]:
    import nncf
    import openvino as ov

    names = [c.name for c in table.candidates if c.name in inputs]
    everything = {c.name: "int8" for c in table.candidates}
    if ratio == 0:
        return everything
    graph = _layers({n: model.model.get_parameter(model.anatomy.component(n).weight) for n in names})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.xml"
        ov.save_model(graph, path, compress_to_fp16=False)
        graph = ov.Core().read_model(path)
        options: dict[str, object] = {}
        if criterion == "activations":
            rows = [tuple(inputs[n][i : i + 64].numpy() for n in names) for i in range(0, 256, 64)]
            options = {
                "dataset": nncf.Dataset(rows),
                "sensitivity_metric": nncf.SensitivityMetric.MEAN_ACTIVATION_VARIANCE,
            }
        else:
            options = {"sensitivity_metric": nncf.SensitivityMetric.WEIGHT_QUANTIZATION_ERROR}
        compressed = nncf.compress_weights(
            graph,
            mode=nncf.CompressWeightsMode.INT4_SYM,
            ratio=ratio,
            group_size=-1,
            all_layers=True,
            **options,
        )
        kinds = _kinds(compressed, names)
    return everything | {name: "int4" for name, kind in kinds.items() if kind == "i4"}


def _layers(weights: dict[str, torch.Tensor]) -> object:
    """One matmul per layer, each with its own input: NNCF's criteria need no more."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    inputs, outputs = [], []
    for name, weight in weights.items():
        parameter = ops.parameter([-1, weight.shape[1]], np.float32, name=name)
        constant = ops.constant(weight.detach().numpy(), name=f"{name}.weight")
        inputs.append(parameter)
        outputs.append(ops.matmul(parameter, constant, False, True, name=f"{name}/product"))
    return ov.Model(outputs, inputs)


def _kinds(graph: object, names: list[str]) -> dict[str, str]:
    """Element type of each layer's weight, following the graph from each input's matmul to its constant."""
    found: dict[str, str] = {}
    for parameter, name in zip(graph.get_parameters(), names, strict=True):  # type: ignore[attr-defined]
        (matmul,) = [c.get_node() for c in parameter.output(0).get_target_inputs()]
        node = matmul.input_value(1).get_node()
        while node.get_type_name() != "Constant":
            node = node.input_value(0).get_node()
        found[name] = node.get_element_type().get_type_name()
    return found
