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
Array = npt.NDArray[Any]
Nodes = dict[str, list[Any]]  # by component
Parts = list[Array]  # what is stored of a weight: numbers, scales, zero points


def map_weights(
    graph: ov.Model,
    model: nn.Module,
    anatomy: Anatomy,
    *,
    without_head: bool = False,
    may_fold: bool = False,
) -> Nodes:
    """Component → the constants of the float32 graph that hold it: one, or one for each use; none for weights that the
    converter folded away. `may_fold`: it may have multiplied batch norms into the convolutions before them, channel by
    channel. Raises TargetError that lists candidates without a constant, or constants that are no weight."""
    weights = _Weights(model, anatomy, may_fold)
    paths = {c.name: _CONVERTER_PREFIX + c.weight for c in anatomy.components}
    constants: dict[str, list[Any]] = defaultdict(list)
    strangers = []
    for node in operations(graph, "Constant"):
        label = node.get_friendly_name()
        if node.get_element_type() != ov.Type.f32 or label.startswith(OURS):
            continue
        digest = _digest(node.data)
        if names := weights.components_of(node.data, digest):
            # Among weights with the same numbers, such as norms of ones, by the converter's name.
            named = (name for name in names if label == paths[name])
            constants[next(named, names[0])].append(node)
        elif node.data.size > SMALL and not weights.explain(node.data, digest):
            strangers.append(f"{label} {list(node.data.shape)}")
    # Weights with equal numbers have the same constants. That is right only while all of them get the same format;
    # `place_weights` checks it.
    for twins in weights.by_digest.values():
        if present := [name for name in twins if name in constants]:
            for name in twins:
                constants.setdefault(name, constants[present[0]])
    needless = {anatomy.head} - {anatomy.embedding} if without_head else set()
    wanted = {c.name: c for c in anatomy.candidates}.keys() - needless
    missing = sorted(wanted - constants.keys())
    if missing or strangers:
        raise TargetError(
            "the weights of the converted graph could not all be recognised; "
            f"without a constant: {', '.join(missing) or 'none'}; constants that are no weight: "
            f"{', '.join(strangers) or 'none'}"
        )
    return dict(constants)


class _Weights:
    """What the weights look like in the converted graph."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, may_fold: bool) -> None:
        self._may_fold = may_fold
        self.by_digest: dict[bytes, list[str]] = defaultdict(list)
        # Norms that multiply by 1 + weight (Gemma, Qwen3-Next).
        self._plus_one: dict[bytes, list[str]] = defaultdict(list)
        # Of small parameters that the converter cut up: Zamba's bias and D, a row for each head.
        self._rows: set[bytes] = set()
        self._decays = {}
        self._convolutions = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for component in anatomy.components:
            name = component.name
            value = _numbers(parameters[component.weight])
            self.by_digest[_digest(value)].append(name)
            if value.ndim == 1:
                self._plus_one[_digest(1 + value)].append(name)
            if value.ndim == 2 and not component.quantizable:
                self._rows |= {_digest(row) for row in value}
            if may_fold and value.ndim == 4:
                self._convolutions[name] = value
            if component.kind == "A_log":
                self._decays[name] = torch.from_numpy(value).exp().numpy()
        buffers = (buffer for buffer in model.buffers() if buffer.is_floating_point())
        self._buffers = {_digest(_numbers(buffer)) for buffer in buffers}

    def components_of(self, data: Array, digest: bytes) -> list[str]:
        """The components that a constant may hold."""
        names = self.by_digest.get(digest) or self._plus_one.get(digest)
        return names or self._decayed(data) or self._scaled(data)

    def explain(self, data: Array, digest: bytes) -> bool:
        """Whether it is a buffer, a row of a parameter, or what folded norms add to each channel."""
        vector = max(data.shape, default=1) == data.size
        return digest in self._buffers | self._rows or (self._may_fold and vector)

    def _decayed(self, data: Array) -> list[str]:
        """The converter folds exp(A_log) into a constant, with its own exponential."""
        return [
            name
            for name, decay in self._decays.items()
            if decay.size == data.size
            and np.allclose(data.reshape(-1), decay.reshape(-1), rtol=1e-6, atol=0)
        ]

    def _scaled(self, data: Array) -> list[str]:
        """Whether a constant is a convolution's weight times one number per output channel: a folded batch norm."""
        for name, weight in self._convolutions.items():
            if weight.size == data.size and len(weight) == len(data):
                values = data.reshape(len(weight), -1)
                rows = weight.reshape(len(weight), -1)
                squares = np.maximum((rows * rows).sum(1, keepdims=True), 1e-30)
                factors = (values * rows).sum(1, keepdims=True) / squares
                error = 1e-6 * float(np.abs(values).max())
                if np.allclose(values, factors * rows, rtol=1e-4, atol=error):
                    return [name]
        return []


def _numbers(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().float().contiguous().numpy()


def _digest(data: Array) -> bytes:
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
    # Identities of constants → what replaced them.
    replaced: dict[tuple[int, ...], ExportedTensor] = {}
    for component in components:
        nodes = nodes_of.get(component.name)
        if not nodes:
            continue
        choice = chosen[component.name]
        recipe = choice.recipe
        name = component.name
        key = tuple(sorted(node.get_instance_id() for node in nodes))
        if twin := replaced.get(key):
            other_recipe = chosen[twin.component].recipe
            if recipe != other_recipe:
                raise TargetError(
                    f"{name} and {twin.component} hold the same numbers and the converter merged them; "
                    f"they cannot be {recipe} and {other_recipe}"
                )
            twin = replace(twin, component=name, planned=choice.planned)
            placed.append(replace(twin, reason=choice.reason))
            continue
        weights = ""
        label = str(recipe)
        if label == FP16:
            label = baseline
            new, parts = _floating(nodes[0].data, component.weight, baseline)
            if baseline == FP16 and component.quantizable:
                weights = store.digest(name, recipe)
        else:
            quantized = moved(store.quantized(name, recipe), torch.device("cpu"))
            new, parts = integer_constant(quantized, recipe.grid, component.weight)
            weights = quantized.digest
        size = sum(part.nbytes for part in parts)
        labels = name, component.weight, choice.planned, label, size, choice.reason
        replaced[key] = ExportedTensor(*labels, bytes_digest(*parts), weights)
        placed.append(replaced[key])
        for node in nodes:
            shape = list(node.data.shape)
            fits = shape == list(new.get_output_shape(0))
            scans.replace(node, new if fits else scans.reshaped(new, shape))
    return placed


def _floating(data: Array, name: str, baseline: str) -> tuple[Any, Parts]:
    """FP16 by numpy's rounding: OpenVINO's own compression on saving doubles some tiny values."""
    stored = np.ascontiguousarray(data, np.float16 if baseline == FP16 else np.float32)
    if not np.isfinite(stored).all():
        raise TargetError(f"{name}: holds values beyond FP16's 65504; rescale the weight")
    node = ops.constant(stored, name=name)
    if baseline == FP16:
        node = ops.convert(node, "f32", name=f"{name}/convert")
    return node, [stored]


def integer_constant(quantized: Quantized, fmt: Format, name: str) -> tuple[Any, Parts]:
    """NNCF's pattern: integers → FP16 (− zero point) × scale (→ back from groups) → float32. NF4 goes to float32 before
    the product. By way of FP16, as NNCF writes it, the ARM plugin rounds the levels, and the x86 plugin does so where
    rows are looked up (2026.4.1)."""
    assert quantized.scales is not None
    scales = quantized.scales.numpy()
    *rows, columns = shape = quantized.shape
    if size := fmt.group_size:
        shape = (*rows, columns // size, size)
    scales = scales.reshape(*shape[:-1], 1)
    packed = fmt.pack(quantized)
    element = _element(fmt)
    wide = isinstance(fmt, NormalFloatFormat)
    if isinstance(fmt, MicroscalingFormat):
        scale = _packed_constant(scales, ov.Type.f8e8m0, scales.shape, f"{name}/scale")
        scale = ops.convert(scale, "f16")
    else:
        scale = ops.constant(np.ascontiguousarray(scales), name=f"{name}/scale")
    if wide:
        scale = ops.convert(scale, "f32")
    value = _packed_constant(packed, element, shape, name)
    value = ops.convert(value, "f32" if wide else "f16")
    parts = [packed, scales]
    if isinstance(fmt, ZeroPointFormat):
        parts.append(fmt.pack_zero_points(quantized))
        zero = _packed_constant(parts[-1], element, scales.shape, f"{name}/zero_point")
        zero = ops.convert(zero, "f16")
        value = ops.subtract(value, zero, name=f"{name}/zero_point/subtract")
    value = ops.multiply(value, scale, name=f"{name}/scaled")
    if size:
        whole = ops.constant(np.asarray(quantized.shape, np.int64))
        value = ops.reshape(value, whole, False, name=f"{name}/ungrouped")
    if not wide:
        value = ops.convert(value, "f32", name=f"{name}/convert")
    return value, parts


def _element(fmt: Format) -> Any:
    if isinstance(fmt, NormalFloatFormat):
        return ov.Type.nf4
    if isinstance(fmt, MicroscalingFormat):
        return ov.Type.f4e2m1
    sign = "u" if isinstance(fmt, ZeroPointFormat) else "i"
    return getattr(ov.Type, f"{sign}{fmt.bits}")


def _packed_constant(
    packed: npt.NDArray[np.uint8], element: Any, shape: tuple[int, ...], name: str
) -> Any:
    # Its own memory: a view of `packed` would outlive it.
    tensor = ov.Tensor(element, ov.Shape(shape))
    tensor.data.reshape(-1)[:] = packed.reshape(-1).view(tensor.data.dtype)
    return ops.constant(tensor, name=name)


def raw_bytes(node: Any) -> npt.NDArray[np.uint8]:
    """A constant's bytes as they are stored; two or four numbers to the byte for four or two bits."""
    return np.ascontiguousarray(node.data).reshape(-1).view(np.uint8)


def stored_digests(graph: ov.Model) -> dict[str, str]:
    """The named weights of a saved graph: name → digest of their bytes, scales and zero points included."""
    nodes = operations(graph, "Constant")
    stored = {node.get_friendly_name(): raw_bytes(node) for node in nodes}
    suffixes = ("", "/scale", "/zero_point")
    parts = {name: [stored.get(name + end) for end in suffixes] for name in stored}
    return {
        name: bytes_digest(*(part for part in parts[name] if part is not None))
        for name in stored
    }


def check_saved(graph: ov.Model, placed: Sequence[ExportedTensor]) -> None:
    """Compares a saved and re-read graph with what was to be stored, byte for byte."""
    stored = stored_digests(graph)
    for tensor in placed:
        if stored.get(tensor.runtime_name) != tensor.digest:
            raise TargetError(
                f"the saved IR is not what was planned: {tensor.runtime_name} holds other numbers"
            )
