"""Converts a PyTorch model to a stateful OpenVINO graph with every weight in float32."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import openvino as ov
import openvino.op as op
import openvino.opset13 as ops
import torch
from torch import nn

from kl_lens.base.errors import TargetError, UnsupportedError, one_line
from kl_lens.model import ImageTask
from kl_lens.targets.openvino import rewrites, scans, session
from kl_lens.targets.openvino.capture import (
    FAMILIES,
    SAMPLE_TOKENS,
    GraphForward,
    ScanSite,
    prepared,
)
from kl_lens.targets.openvino.folder import IR_FILE
from kl_lens.targets.session import SessionSettings
from kl_lens.weights.store import state_of

Made = TypeVar("Made")
PROOF_TOKENS = 24
PROOF_PARTS = [7, 1, 1, 15]
PROOF_SHARE = 1e-3  # largest difference from PyTorch: of the logits' range, or of an image's largest logit
# What was made of models in memory. Tracing takes seconds, and plans differ only in their constants.
_built: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def on_cpu(model: nn.Module) -> nn.Module:
    """The model itself, or a copy if it is on a GPU: OpenVINO's converter reads weights in the host's memory."""

    def copied() -> nn.Module:
        # Tensors that deepcopy finds here are not copied on the card first.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().cpu(), False) for p in model.parameters()
        }
        memo |= {id(buffer): buffer.cpu() for buffer in model.buffers()}
        return copy.deepcopy(model, memo)

    return (
        model
        if next(model.parameters()).device.type == "cpu"
        else _remembered(model, "copy", copied)
    )


def graph_of(
    model: nn.Module, static_tokens: int | None = None, *, with_head: bool = True
) -> ov.Model:
    """Token ids in, logits (or, without the head, the last hidden states) out; states inside, or with `static_tokens`
    a forward of exactly so many tokens from an empty past. Raises UnsupportedError unless the family is tested or the
    graph is proven on this model."""
    family = str(getattr(model.config, "model_type", type(model).__name__))
    if family not in FAMILIES:
        _remembered(model, "proof", partial(_prove, model, family))
    return _traced(model, static_tokens, with_head).clone()


def _traced(model: nn.Module, static: int | None, with_head: bool) -> ov.Model:
    build = partial(_build, model, static, with_head)
    return _remembered(model, (static, with_head), build)


def _remembered(model: nn.Module, variant: Hashable, build: Callable[[], Made]) -> Made:
    """What was made of a model is kept as long as its weights do not change."""
    key = (variant, tuple(state_of(parameter) for parameter in model.parameters()))
    built = _built.setdefault(model, {})
    if key not in built:
        for outdated in [k for k in built if k[1] != key[1]]:  # type: ignore[index]
            del built[outdated]  # made from other weights
        built[key] = build()
    result: Made = built[key]
    return result


def _prove(model: nn.Module, family: str) -> None:
    """Compares the graph's logits with the model's, for a whole prompt and for parts of it."""
    refused = f"{family} cannot be exported to OpenVINO: "
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (1, PROOF_TOKENS), generator=generator)
    try:
        graph = _traced(model, None, True)
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0].float().numpy()
        opened = _session(graph)
        whole = opened.logits(ids[0].tolist())
        opened.reset()
        parts = [
            opened.feed(part.tolist(), every=True) for part in ids[0].split(PROOF_PARTS)
        ]
    except TargetError as error:
        raise UnsupportedError(refused + one_line(error)) from error
    except Exception as error:  # a model's code, meeting our cache, may raise anything
        reason = f"it cannot be traced ({one_line(error)})"
        raise UnsupportedError(refused + reason) from error
    off = float(np.abs(np.stack([whole, np.concatenate(parts)]) - expected).max())
    if not off <= PROOF_SHARE * float(np.ptp(expected)):
        raise UnsupportedError(
            f"{refused}the converted graph gives other logits than PyTorch, off by {off:.1e} in a range of "
            f"{float(np.ptp(expected)):.1e}"
        )


def _session(graph: ov.Model, task: ImageTask | None = None) -> session.OpenVINOSession:
    """As an export would be: rewritten, saved, read again."""
    shipped = graph.clone()
    rewrites.name_head(shipped)
    rewrites.apply(shipped)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / IR_FILE
        ov.save_model(shipped, path, compress_to_fp16=False)
        exact = SessionSettings(exact=True)
        return session.loaded(path, exact, task)


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        output = self.model(pixels)
        return output if isinstance(output, torch.Tensor) else output["logits"]


def image_graph_of(model: nn.Module, task: ImageTask) -> ov.Model:
    """An image classifier: one prepared image in, logits out, no state. Cached, with every weight in float32."""
    return _remembered(model, task.key, partial(_build_images, model, task)).clone()


def _build_images(model: nn.Module, task: ImageTask) -> ov.Model:
    """No architecture is listed: a graph whose logits on noise differ from PyTorch's is refused."""
    shape = task.shape
    with torch.no_grad():
        graph = convert_quietly(_Classifier(model), (torch.zeros(1, *shape),))
    graph.reshape([1, *shape])
    _name(graph.get_parameters()[0], "pixel_values")
    _name(graph.get_results()[0], "logits")
    graph.validate_nodes_and_infer_types()
    ids = task.sample(model, 1, 4)
    with torch.inference_mode():
        expected = task.forward(model, ids)[0].float().cpu().numpy()
    logits = _session(graph, task).logits(ids[0].tolist())
    off = float(np.abs(logits - expected).max() / np.abs(expected).max())
    if not off <= PROOF_SHARE:
        raise TargetError(
            f"{type(model).__name__}: OpenVINO {ov.__version__} gives logits that are off by {off:.1e} of the "
            "largest; it cannot be exported"
        )
    return graph


def _build(model: nn.Module, static: int | None, with_head: bool) -> ov.Model:
    tokens = static or SAMPLE_TOKENS
    with (
        prepared(model, stateful=static is None, with_head=with_head) as graph,
        torch.no_grad(),
    ):
        converted = convert_quietly(graph, graph.example_inputs(tokens))
        return _stitch(converted, graph, static, with_head)


def convert_quietly(graph: nn.Module, inputs: tuple[torch.Tensor, ...]) -> ov.Model:
    """Runs OpenVINO's converter without the tracer's warnings; tests check what they warn of. The converter reports
    each call to a server and waits for it, but not in CI."""
    no_telemetry = mock.patch.dict(os.environ, CI="true")
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stderr(io.StringIO()),
            no_telemetry,
        ):
            return ov.convert_model(graph, example_input=inputs)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(
            f"OpenVINO {ov.__version__} cannot convert this model: {reason}"
        ) from error
    finally:
        logger.setLevel(level)


def _stitch(
    converted: ov.Model, graph: GraphForward, static: int | None, with_head: bool
) -> ov.Model:
    """Puts the scans back in, and turns the state inputs and outputs into variables."""
    names = graph.state_names
    parameters = converted.get_parameters()
    values = [result.input_value(0) for result in converted.get_results()]
    counts = [len(site.arguments) for site in graph.sites]
    expected = (1 + len(names) + len(graph.sites), 1 + len(names) + sum(counts))
    if (len(parameters), len(values)) != expected:
        raise TargetError(
            f"the graph has {len(parameters)} inputs and {len(values)} outputs, not {expected}"
        )
    ids, *state_inputs = parameters[: 1 + len(names)]
    results = parameters[1 + len(names) :]
    _set_shapes(graph, static, ids, state_inputs, results)
    converted.validate_nodes_and_infer_types()

    beams = ops.parameter(ov.PartialShape([-1]), np.int32)
    if static is None:
        _require_one_sequence(ids, beams)
    sinks = []
    for name, parameter, value in zip(names, state_inputs, values[1:], strict=False):
        read, variable = _variable(name, list(parameter.get_partial_shape())[1:], beams)
        scans.replace(parameter, ops.gather(read, beams, 0))
        sinks.append(_assign(value, variable))
    arguments = iter(values[1 + len(names) :])
    for site, count, result in zip(graph.sites, counts, results, strict=True):
        state, variable = _scan_state(site, static, beams)
        inputs = (*islice(arguments, count), state)
        y, last = _scan(site, inputs, static)
        scans.replace(result, y)
        if variable is not None:
            _, stored = _shapes(site)
            sequences = ops.concat([ops.shape_of(beams), stored], 0)
            last = ops.broadcast(scans.reshaped(last, [1, *stored]), sequences)
            sinks.append(_assign(last, variable))

    output = ops.result(values[0])
    ports = {session.IDS: ids}
    if static is None:
        # OpenVINO GenAI insists on a mask. It holds ones for a single sequence, so nothing here reads it.
        mask = ops.parameter(ov.PartialShape([-1, -1]), np.int64)
        ports |= {session.ATTENTION_MASK: mask, session.BEAM_IDX: beams}
    model = ov.Model([output], sinks, list(ports.values()), "kl_lens")
    for name, parameter in ports.items():
        _name(parameter, name)
    _name(output, "logits" if with_head else "last_hidden_state")
    model.validate_nodes_and_infer_types()
    return model


def _name(port: Any, name: str) -> None:
    port.set_friendly_name(name)
    port.output(0).get_tensor().set_names({name})


def _require_one_sequence(ids: Any, beams: Any) -> None:
    """All tokens belong to one sequence; with more sequences the Reshape fails. It also keeps OpenVINO GenAI from
    changing the attention. On x86 it first tries paged attention, which drops `beam_idx`; positions and sliding windows
    of these graphs would come out wrong without a word. As every graph needs `beam_idx`, the attempt fails, and GenAI
    takes the graph as it is."""
    readers = ids.output(0).get_target_inputs()
    tokens = ops.reduce_prod(ops.shape_of(ids), [0], True)
    rows = ops.reshape(ids, ops.concat([ops.shape_of(beams), tokens], 0), False)
    for reader in readers:
        reader.replace_source_output(rows.output(0))


def _set_shapes(
    graph: GraphForward,
    static: int | None,
    ids: Any,
    states: list[Any],
    results: list[Any],
) -> None:
    time = static or -1
    # The CPU plugin (2026.4.1) loses states unless what is assigned to them has the axes of unknown length that the
    # variable has. So the number of sequences is left open everywhere but in the scans, which take one.
    ids.set_partial_shape(ov.PartialShape([1 if static else -1, time]))
    for parameter, shape in zip(states, graph.state_shapes(-1, -1), strict=True):
        parameter.set_partial_shape(ov.PartialShape(shape))
    for parameter, site in zip(results, graph.sites, strict=True):
        positions = time + graph.prefix if static else -1
        parameter.set_partial_shape(ov.PartialShape([positions, *site.result_shape]))


def _variable(
    name: str, shape: list[Any], beams: Any, first: Any = None
) -> tuple[Any, Any]:
    """A state: the node that reads it, and the variable that keeps it. It begins as zeros (or `first`), with length 0
    along an axis that grows. `shape` is that of one sequence. The axis of sequences is of unknown length: by this
    OpenVINO GenAI tells recurrent states from keys and values."""
    sizes = ov.PartialShape(shape)
    start = [axis.get_length() if axis.is_static else 0 for axis in sizes]
    zeros = first or np.float32(0)
    info = op.util.VariableInfo()
    info.variable_id = name
    info.data_type = ov.Type.f32
    info.data_shape = ov.PartialShape([-1, *sizes])
    variable = op.util.Variable(info)
    read = op.read_value(
        ops.broadcast(zeros, ops.concat([ops.shape_of(beams), start], 0)), variable
    )
    read.set_friendly_name(name)
    return read, variable


def _assign(value: Any, variable: Any) -> Any:
    """Assign takes only nodes with a single output; a conversion that changes nothing makes one of any output."""
    node = value.get_node() if isinstance(value, ov.Output) else value
    if node.get_output_size() > 1:
        node = ops.convert(value, "f32")
    return op.assign(node, variable)


def _scan_state(site: ScanSite, static: int | None, beams: Any) -> tuple[Any, Any]:
    shape, stored = _shapes(site)
    first = scans.weighted_start(shape[1]) if site.kind == "weighted" else None
    if static is not None:
        return first or ops.broadcast(np.float32(0), list(shape)), None
    read, variable = _variable(f"scan.{site.name}", stored, beams, first)
    # A Reshape to one sequence would do, but crashes the CPU plugin (2026.4.1).
    state = ops.gather(read, ops.gather(beams, 0, 0), 0)
    return scans.reshaped(state, list(shape)), variable


def _shapes(site: ScanSite) -> tuple[tuple[int, ...], list[int]]:
    """Of the state inside the scan, and in the variable: OpenVINO GenAI expects at most three axes besides that of
    sequences."""
    if site.kind in ("chunked", "lightning"):
        shape = _sizes(site).state_shape
        return shape, [*shape[1:3], shape[3] * shape[4]]
    shape = site.state_shape[::-1] if site.kind == "selective" else site.state_shape
    return shape, list(shape)


def _scan(site: ScanSite, inputs: scans.Inputs, static: int | None) -> tuple[Any, Any]:
    if site.kind in ("delta", "weighted"):
        scan = scans.delta_scan if site.kind == "delta" else scans.weighted_scan
        return scan(inputs, site.state_shape)
    if site.kind == "selective":
        return scans.selective_scan(inputs, *site.state_shape)
    sizes = _sizes(site)
    if static == 1:
        return scans.one_token_scan(inputs, sizes)
    # The x86 plugin (2026.4.1) computes MiniMax's wrongly inside an If.
    if static is None and site.kind == "chunked":
        return scans.one_or_many_scan(inputs, sizes)
    single = static is not None and static <= scans.CHUNK
    return scans.chunked_scan(inputs, sizes, single=single)


def _sizes(site: ScanSite) -> scans.Sizes:
    heads, width, states = site.state_shape
    return scans.Sizes(heads, width, states, groups=int(site.arguments[3].shape[1]))
