"""Finds the constant of every weight in the graph and replaces it by one in the planned format.

Weights are recognised by their bytes in the float32 graph. Names are not enough: the converter renames, reshapes and
folds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
import torch
from torch import nn

from kl_lens.base.errors import TargetError
from kl_lens.base.files import bytes_digest
from kl_lens.model import Anatomy
from kl_lens.run.records import Component, ExportedTensor
from kl_lens.targets.exporting import Choice
from kl_lens.targets.openvino import scans
from kl_lens.targets.openvino.rewrites import operations
from kl_lens.weights.formats import Format, Quantized
from kl_lens.weights.formats.integer import ZeroPointFormat
from kl_lens.weights.formats.tables import MicroscalingFormat, NormalFloatFormat
from kl_lens.weights.recipes import FP16
from kl_lens.weights.store import WeightStore, moved

SMALL = 64  # constants up to this size may be anything the converter computed: epsilons, scales, shapes
OURS = "kl_lens/"  # prefix of constants that we add: masks, ones, tables
_CONVERTER_PREFIX = "self.model."
Nodes = dict[str, list[Any]]  # by component


def map_weights(
    graph: ov.Model,
    model: nn.Module,
    anatomy: Anatomy,
    *,
    without_head: bool = False,
    may_fold: bool = False,
) -> tuple[Nodes, list[str]]:
    """Component → the constants of the float32 graph that hold it (one, or one for each use); and the weights that were
    folded away without effect. `may_fold`: the converter may have multiplied batch norms into the convolutions before
    them, channel by channel. Raises TargetError that lists candidates without a constant, or constants that are no
    weight."""
    by_digest: dict[bytes, list[str]] = defaultdict(list)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Norms that multiply by 1 + weight (Gemma, Qwen3-Next).
    plus_one: dict[bytes, list[str]] = defaultdict(list)
    # Of small parameters that the converter cut up: Zamba's bias and D, a row for each head.
    rows: dict[bytes, str] = {}
    decays = {}
    convolutions = {}
    for component in anatomy.components:
        value = parameters[component.weight].detach()
        by_digest[_digest(_numbers(value))].append(component.name)
        if value.dim() == 1:
            plus_one[_digest(1 + _numbers(value))].append(component.name)
        if value.dim() == 2 and not component.quantizable:
            rows |= {_digest(row): component.name for row in _numbers(value)}
        if may_fold and value.dim() == 4:
            convolutions[component.name] = _numbers(value)
        if component.kind == "A_log":
            decays[component.name] = torch.exp(value.float()).numpy()
    buffers = {
        _digest(_numbers(b))
        for _, b in model.named_buffers()
        if b.dtype.is_floating_point
    }

    weights = {c.name: c.weight for c in anatomy.components}
    constants: dict[str, list[Any]] = defaultdict(list)
    strangers = []
    cut_up = set()
    for node in operations(graph, "Constant"):
        if node.get_element_type() != ov.Type.f32 or node.get_friendly_name().startswith(
            OURS
        ):
            continue
        digest = _digest(node.data)
        names = (
            by_digest.get(digest)
            or plus_one.get(digest)
            or _decay_names(node.data, decays)
        )
        names = names or _scaled_names(node.data, convolutions)
        if names:  # among weights with the same numbers, such as norms of ones, by the converter's name
            exact = (
                name
                for name in names
                if node.get_friendly_name() == _CONVERTER_PREFIX + weights[name]
            )
            constants[next(exact, names[0])].append(node)
        elif digest in rows:
            cut_up.add(rows[digest])
        elif digest in buffers or (
            may_fold and max(node.data.shape, default=1) == node.data.size
        ):
            continue  # where norms are folded, what they add to each channel is left
        elif node.data.size > SMALL:
            strangers.append(f"{node.get_friendly_name()} {list(node.data.shape)}")
    # Weights with equal numbers have the same constants. That is right only while all of them get the same format;
    # `place_weights` checks it.
    for twins in by_digest.values():
        if present := [name for name in twins if constants.get(name)]:
            constants |= {
                name: list(constants[present[0]])
                for name in twins
                if not constants.get(name)
            }
    absent = (
        {anatomy.head} if without_head and anatomy.head != anatomy.embedding else set()
    )
    missing = [
        c.name
        for c in anatomy.candidates
        if not constants.get(c.name) and c.name not in absent
    ]
    if missing or strangers:
        raise TargetError(
            "the weights of the converted graph could not all be recognised; "
            f"without a constant: {', '.join(missing) or 'none'}; constants that are no weight: "
            f"{', '.join(strangers) or 'none'}"
        )
    folded = [
        c.name
        for c in anatomy.components
        if not constants.get(c.name) and c.name not in cut_up
    ]
    return dict(constants), folded


def _decay_names(
    data: npt.NDArray[Any], decays: dict[str, npt.NDArray[Any]]
) -> list[str]:
    """The converter folds exp(A_log) into a constant, with its own exponential."""
    return [
        name
        for name, decay in decays.items()
        if decay.size == data.size
        and np.allclose(data.reshape(-1), decay.reshape(-1), rtol=1e-6, atol=0)
    ]


def _scaled_names(
    data: npt.NDArray[Any], convolutions: dict[str, npt.NDArray[np.float32]]
) -> list[str]:
    """Whether a constant is a convolution's weight times one number per output channel: a folded batch norm."""
    for name, weight in convolutions.items():
        if weight.size == data.size and weight.shape[0] == data.shape[0]:
            values = data.reshape(len(weight), -1)
            rows = weight.reshape(len(weight), -1)
            squares = np.maximum((rows * rows).sum(1, keepdims=True), 1e-30)
            factors = (values * rows).sum(1, keepdims=True) / squares
            if np.allclose(
                values, factors * rows, rtol=1e-4, atol=1e-6 * float(np.abs(values).max())
            ):
                return [name]
    return []


def _numbers(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().float().contiguous().numpy()


def _digest(data: npt.NDArray[Any]) -> bytes:
    return hashlib.blake2b(
        np.ascontiguousarray(data).view(np.uint8).data, digest_size=16
    ).digest()


def place_weights(
    nodes_of: Nodes,
    store: WeightStore,
    components: Sequence[Component],
    chosen: dict[str, Choice],
    baseline: str,
) -> list[ExportedTensor]:
    """Replaces the constants of every weight by one in its recipe, named after the parameter; returns their records."""
    placed: list[ExportedTensor] = []
    replaced: dict[
        tuple[int, ...], ExportedTensor
    ] = {}  # identities of constants → what replaced them
    for component in components:
        nodes = nodes_of.get(component.name)
        if not nodes:
            continue
        choice = chosen[component.name]
        recipe = choice.recipe
        key = tuple(sorted(node.get_instance_id() for node in nodes))
        if key in replaced:
            owner = replaced[key]
            if recipe != (recipe_of_owner := chosen[owner.component].recipe):
                raise TargetError(
                    f"{component.name} and {owner.component} hold the same numbers and the converter merged them; "
                    f"they cannot be {recipe} and {recipe_of_owner}"
                )
            record = replace(
                owner,
                component=component.name,
                planned=choice.planned,
                reason=choice.reason,
            )
            placed.append(record)
            continue
        weights = ""
        label = str(recipe)
        if label == FP16:
            source = nodes[0].data
            new = _floating(source, component.weight, baseline)
            stored = (source.astype(np.float16) if baseline == FP16 else source).view(
                np.uint8
            )
            size = stored.nbytes
            digest = bytes_digest(stored)
            label = baseline
            if baseline == FP16 and component.quantizable:
                weights = store.digest(component.name, recipe)
        else:
            quantized = moved(
                store.quantized(component.name, recipe), torch.device("cpu")
            )
            new, size, digest = integer_constant(quantized, recipe.grid, component.weight)
            weights = quantized.digest
        names = component.name, component.weight, choice.planned, label
        replaced[key] = ExportedTensor(*names, size, choice.reason, digest, weights)
        placed.append(replaced[key])
        for node in nodes:
            fits = list(node.data.shape) == list(new.get_output_shape(0))
            scans.replace(
                node, new if fits else scans.reshaped(new, list(node.data.shape))
            )
    return placed


def _floating(data: npt.NDArray[Any], name: str, baseline: str) -> Any:
    """FP16 by numpy's rounding: OpenVINO's own compression on saving doubles some tiny values."""
    stored = np.ascontiguousarray(data, np.float16 if baseline == FP16 else np.float32)
    if not np.isfinite(stored).all():
        raise TargetError(f"{name}: holds values beyond FP16's 65504; rescale the weight")
    constant = ops.constant(stored)
    constant.set_friendly_name(name)
    if baseline != FP16:
        return constant
    convert = ops.convert(constant, "f32")
    convert.set_friendly_name(f"{name}/convert")
    return convert


def integer_constant(
    quantized: Quantized, fmt: Format, name: str
) -> tuple[Any, int, str]:
    """NNCF's pattern: integers → FP16 (− zero point) × scale (→ back from groups) → float32. NF4 goes to float32 before
    the product. By way of FP16, as NNCF writes it, the ARM plugin rounds the levels, and the x86 plugin does so where
    rows are looked up (2026.4.1)."""
    assert quantized.scales is not None
    scales = quantized.scales.numpy()
    rows = quantized.shape[:-1]
    columns = quantized.shape[-1]
    grouped = fmt.group_size is not None
    stored_shape = (
        (*rows, columns // fmt.group_size, fmt.group_size)
        if fmt.group_size
        else quantized.shape
    )
    packed = fmt.pack(quantized)
    element = _element(fmt)
    constant = _packed_constant(packed, element, stored_shape, name)
    scale_values = scales[..., None] if grouped else scales.reshape(*rows, 1)
    if isinstance(fmt, MicroscalingFormat):
        scale = _packed_constant(
            scales.reshape(-1), ov.Type.f8e8m0, scale_values.shape, f"{name}/scale"
        )
        scale = ops.convert(scale, "f16")
    else:
        scale = ops.constant(np.ascontiguousarray(scale_values))
        scale.set_friendly_name(f"{name}/scale")
    wide = isinstance(fmt, NormalFloatFormat)
    if wide:
        scale = ops.convert(scale, "f32")
    value = ops.convert(constant, "f32" if wide else "f16")
    zero_points = np.empty(0, np.uint8)
    if isinstance(fmt, ZeroPointFormat):
        zero_points = fmt.pack_zero_points(quantized)
        zero = _packed_constant(
            zero_points, element, scale_values.shape, f"{name}/zero_point"
        )
        value = ops.subtract(value, ops.convert(zero, "f16"))
        value.set_friendly_name(f"{name}/zero_point/subtract")
    value = ops.multiply(value, scale)
    value.set_friendly_name(f"{name}/scaled")
    if grouped:
        value = ops.reshape(
            value, ops.constant(np.asarray(quantized.shape, np.int64)), False
        )
        value.set_friendly_name(f"{name}/ungrouped")
    if not wide:
        value = ops.convert(value, "f32")
        value.set_friendly_name(f"{name}/convert")
    digest = bytes_digest(packed, scale_values, zero_points)
    return value, packed.nbytes + scales.nbytes + zero_points.nbytes, digest


def _element(fmt: Format) -> Any:
    if isinstance(fmt, NormalFloatFormat):
        return ov.Type.nf4
    if isinstance(fmt, MicroscalingFormat):
        return ov.Type.f4e2m1
    if isinstance(fmt, ZeroPointFormat):
        return ov.Type.u2 if fmt.bits == 2 else ov.Type.u4
    return ov.Type.i4 if fmt.bits == 4 else ov.Type.i8


def _packed_constant(
    packed: npt.NDArray[np.uint8], element: Any, shape: tuple[int, ...], name: str
) -> Any:
    tensor = ov.Tensor(
        element, ov.Shape(shape)
    )  # its own memory: a view of `packed` would outlive it
    tensor.data.reshape(-1)[:] = packed.view(tensor.data.dtype)
    constant = ops.constant(tensor)
    constant.set_friendly_name(name)
    return constant


def raw_bytes(node: Any) -> npt.NDArray[np.uint8]:
    """A constant's bytes as they are stored; two or four numbers to the byte for four or two bits."""
    return np.ascontiguousarray(node.data).reshape(-1).view(np.uint8)


def stored_digests(graph: ov.Model) -> dict[str, str]:
    """The named weights of a saved graph: name → digest of their bytes, scales and zero points included."""
    stored = {
        node.get_friendly_name(): raw_bytes(node)
        for node in operations(graph, "Constant")
    }
    parts = ("", "/scale", "/zero_point")
    return {
        name: bytes_digest(
            *(stored[name + part] for part in parts if name + part in stored)
        )
        for name in stored
    }


def check_saved(graph: ov.Model, placed: Sequence[ExportedTensor]) -> None:
    """Compares a saved and re-read graph with what was to be stored, byte for byte."""
    stored = stored_digests(graph)
    wrong = [
        tensor.runtime_name
        for tensor in placed
        if stored.get(tensor.runtime_name) != tensor.digest
    ]
    if wrong:
        raise TargetError(
            f"the saved IR is not what was planned: {wrong[0]} holds other numbers"
        )
