"""Converts image classifiers to static graphs: one prepared image in, logits out, no state.

No architecture is listed: every converted graph is compared with PyTorch, and refused if it differs.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from torch import nn

from kl_lens.base.errors import TargetError
from kl_lens.model import ImageTask
from kl_lens.targets.openvino.graph import convert_quietly, remembered
from kl_lens.targets.openvino.image_session import INPUT, ImageSession
from kl_lens.targets.openvino.rewrites import apply
from kl_lens.targets.openvino.session import compile_graph, read_graph

PARITY = 1e-3  # largest difference from PyTorch, as a share of the largest logit, with float32 weights


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        output = self.model(pixels)
        return output if isinstance(output, torch.Tensor) else output["logits"]


def image_graph_of(model: nn.Module, task: ImageTask) -> ov.Model:
    """The graph with every weight in float32, cached."""
    return remembered(model, task.preparation, partial(_build, model, task))


def _build(model: nn.Module, task: ImageTask) -> ov.Model:
    shape = task.preparation.shape
    with torch.no_grad():
        graph = convert_quietly(_Classifier(model), (torch.zeros(1, *shape),))
    graph.reshape([1, *shape])
    graph.inputs[0].get_tensor().set_names({INPUT})
    graph.get_parameters()[0].set_friendly_name(INPUT)
    graph.outputs[0].get_tensor().set_names({"logits"})
    graph.get_results()[0].set_friendly_name("logits")
    graph.validate_nodes_and_infer_types()
    _compare(graph, model, task)
    return graph


def _compare(graph: ov.Model, model: nn.Module, task: ImageTask) -> None:
    """Refuses a graph whose logits on noise differ from PyTorch's."""
    ids = task.sample(model, 1, 4)
    with torch.inference_mode():
        expected = task.forward(model, ids)[0].float().cpu().numpy()
    with tempfile.TemporaryDirectory() as folder:
        ov.save_model(graph, Path(folder) / "graph.xml", compress_to_fp16=False)
        shipped = read_graph(Path(folder) / "graph.xml")
        apply(shipped, ())  # as export does: the ARM plugin's own SoftPlus is off
        compiled = compile_graph(shipped, "CPU", exact=True)
        given = ImageSession(compiled, task.preparation, {}).logits(ids[0].tolist())
    off = float(np.abs(given - expected).max() / np.abs(expected).max())
    if not off <= PARITY:
        raise TargetError(
            f"{type(model).__name__}: OpenVINO {ov.__version__} gives logits that are off by {off:.1e} of the "
            "largest; it cannot be exported"
        )
