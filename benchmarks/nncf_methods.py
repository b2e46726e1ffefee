"""NNCF's own weight compression, with and without data, applied to a graph that we exported."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets import get_target
from kl_lens.targets.openvino.folder import graph_file
from kl_lens.targets.openvino.session import ATTENTION_MASK, BEAM_IDX, read_graph
from kl_lens.weights.formats import get_format

# Label → further arguments of `compress_weights`.
NNCF_METHODS: dict[str, dict[str, bool]] = {
    "nncf data-free": {},
    "nncf awq+scale": {"awq": True, "scale_estimation": True},
    "nncf gptq": {"gptq": True},
    "nncf gptq+scale": {"gptq": True, "scale_estimation": True},
}


def put_file(
    model: LoadedModel,
    folder: Path,
    grid: str,
    method: str,
    ids: torch.Tensor,
    ratio: float = 1.0,
) -> int:
    """Replaces the graph in an exported folder by NNCF's; returns its bytes. The folder's record says how to run it."""
    import openvino as ov

    inputs = {ATTENTION_MASK: np.ones((1, 1), np.int64), BEAM_IDX: np.zeros(1, np.int32)}
    samples = [{"input_ids": window[None].numpy(), **inputs} for window in ids]
    with tempfile.TemporaryDirectory() as temporary:
        get_target("openvino").export(
            model, Plan("fp16", {}, "fp16"), Path(temporary) / "fp16"
        )
        file = graph_file(Path(temporary) / "fp16")
        graph = compressed(file, grid, method, samples, ratio=ratio)
        ov.save_model(graph, folder / file.name, compress_to_fp16=False)
    return get_target("openvino").loaded_bytes(folder)


def compressed(
    graph_file: Path,
    grid: str,
    method: str,
    samples: Sequence[Any],
    *,
    ratio: float = 1.0,
    **further: Any,
) -> Any:
    """The graph with its inner products on a grid, embedding and head at symmetric 8 bits: NNCF's own default.

    Where groups do not divide the columns they are adjusted, and at last 8 bits, as our formats fall back.
    """
    import nncf

    nncf.set_log_level(logging.ERROR)
    fmt = get_format(grid)
    options: dict[str, Any] = dict(NNCF_METHODS[method])
    graph = read_graph(graph_file)
    _untransposed(graph)
    if any(options.values()):
        options |= {"dataset": nncf.Dataset(list(samples)), "subset_size": len(samples)}
    fallback = nncf.GroupSizeFallbackMode.ADJUST
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        return nncf.compress_weights(
            graph,
            mode=nncf.CompressWeightsMode.INT4_SYM
            if fmt.symmetric
            else nncf.CompressWeightsMode.INT4_ASYM,
            ratio=ratio,
            group_size=fmt.group_size or -1,
            backup_mode=nncf.BackupMode.INT8_SYM,
            advanced_parameters=nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=fallback
            ),
            **options,
            **further,
        )


def _untransposed(graph: Any) -> None:
    """Puts a Transpose before products with transposed activations, which NNCF's GPTQ refuses."""
    import openvino.opset13 as ops

    for node in graph.get_ops():
        if node.get_type_name() != "MatMul" or not node.get_attributes()["transpose_a"]:
            continue
        inputs = node.input_value(0)
        weight = node.input_value(1)
        axes = list(range(inputs.get_partial_shape().rank.get_length()))
        axes[-2:] = axes[-1], axes[-2]
        turned = ops.transpose(inputs, ops.constant(np.array(axes, np.int64)))
        product = ops.matmul(turned, weight, False, node.get_attributes()["transpose_b"])
        product.set_friendly_name(node.get_friendly_name())
        for reader in node.output(0).get_target_inputs():
            reader.replace_source_output(product.output(0))
    graph.validate_nodes_and_infer_types()
