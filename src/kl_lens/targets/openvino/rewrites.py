"""Changes to a finished graph that the CPU plugins need to be right.

- exact softplus: the ARM CPU plugin's SoftPlus is off by 4e-4 (2025.2 to 2026.4.1), enough to spoil Δ.
- equal batches: the x86 CPU plugin (2026.4.1) loses the tokens of one batch that meets a stack of matrices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops

from kl_lens.base.errors import TargetError
from kl_lens.targets.openvino.scans import constant, replace

HEAD_NODE = "lm_head"  # name of the head's product in the graph
SOFTPLUS_DEGREE = 9  # relative error of the polynomial: below 1e-7


def graphs(model: ov.Model) -> Iterator[ov.Model]:
    """The model and every graph inside it, innermost last."""
    yield model
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "TensorIterator":
            yield from graphs(node.get_body())
        elif kind == "Loop":
            yield from graphs(node.get_function())
        elif kind == "If":
            yield from graphs(node.get_then_body())
            yield from graphs(node.get_else_body())


def operations(model: ov.Model, *kinds: str) -> list[Any]:
    """All nodes of these types, also inside loops and branches."""
    return [
        node
        for graph in graphs(model)
        for node in graph.get_ordered_ops()
        if node.get_type_name() in kinds
    ]


def apply(model: ov.Model) -> None:
    """Rewrites the model in place."""
    _each(model, "SoftPlus", lambda node: exact_softplus(node.input_value(0)))
    equal_batches(model)
    for graph in graphs(model):
        graph.validate_nodes_and_infer_types()
    model.validate_nodes_and_infer_types()


_MADE_UP = re.compile(r"[A-Za-z]+_\d+")


def number_names(model: ov.Model) -> None:
    """Renames nodes that OpenVINO numbered through the whole process (`Add_104729`) with numbers within the graph, so
    that the same plan always gives the same bytes."""
    nodes = (node for graph in graphs(model) for node in graph.get_ordered_ops())
    for number, node in enumerate(nodes):
        unique = f"{node.get_type_name()}_{number}"
        if _MADE_UP.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(unique)
        for index, output in enumerate(node.outputs()):
            if any(map(_MADE_UP.fullmatch, names := output.get_names())):
                lasting = {name for name in names if not _MADE_UP.fullmatch(name)}
                output.get_tensor().set_names(lasting | {f"{unique}:{index}"})


def _each(model: ov.Model, kind: str, replacement: Callable[[Any], Any | None]) -> None:
    for node in operations(model, kind):
        if (new := replacement(node)) is not None:
            new.set_friendly_name(node.get_friendly_name())
            replace(node, new)


def exact_softplus(x: Any) -> Any:
    """relu(x) + log1p(e) with e = exp(−|x|), and log1p(e) = e · p(e) with a polynomial p. Plugins fuse log(1 + exp(x))
    back into a softplus, so other operations are used. There is no division: the ARM plugin computes it as a power,
    slower than all the rest."""
    small = ops.exp(ops.negative(ops.abs(x)))
    highest, *lower = reversed(_log1p_coefficients())
    polynomial: Any = constant(highest, np.float32)
    for coefficient in lower:
        polynomial = ops.add(polynomial * small, np.float32(coefficient))
    return ops.relu(x) + small * polynomial


@functools.cache
def _log1p_coefficients() -> list[float]:
    """log1p(e)/e on 0 … 1, interpolated at Chebyshev's points; constant term first."""
    series = np.polynomial.Chebyshev.interpolate(
        lambda e: np.log1p(e) / e, SOFTPLUS_DEGREE, [0, 1]
    )
    return [float(c) for c in series.convert(kind=np.polynomial.Polynomial).coef]


def weights_on_the_right(model: ov.Model) -> None:
    """W · x becomes (xᵀ · Wᵀ)ᵀ: plugins have fast kernels for compressed weights on the right only."""

    def turned(node: Any) -> Any | None:
        attributes = node.get_attributes()
        matrix = node.input_value(0)
        x = node.input_value(1)
        if matrix.get_node().get_type_name() != "Constant" or attributes["transpose_a"]:
            return None
        ranks = [len(value.get_partial_shape()) for value in (matrix, x)]
        if ranks != [2, 3]:
            return None
        order = [0, 2, 1]
        rows = x if attributes["transpose_b"] else ops.transpose(x, order)
        return ops.transpose(ops.matmul(rows, matrix, False, True), order)

    _each(model, "MatMul", turned)


def name_head(graph: ov.Model) -> None:
    """Names the head's product, the last MatMul before the logits, so that sessions find it."""
    node = graph.get_results()[0]
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            raise TargetError(
                "no matrix product before the logits; this head is not understood"
            )
        node = node.input_value(0).get_node()
    node.set_friendly_name(HEAD_NODE)


def equal_batches(model: ov.Model) -> None:
    """Copies activations once for each matrix of a constant stack (the experts of a mixture) before the product. The
    x86 plugin turns such a product into a FullyConnected that does not broadcast: activations of shape (1, tokens,
    width) give no results, wrong ones, or a crash."""

    def copied(node: Any) -> Any | None:
        stack = node.input_value(1)
        batches = list(stack.get_partial_shape())[:-2]
        if all(batch == 1 for batch in batches) or not is_constant(stack.get_node()):
            return None
        x = node.input_value(0)
        attributes = node.get_attributes()
        if list(x.get_partial_shape())[:-2] == batches:
            return None
        shape = [*(batch.get_length() for batch in batches), 1, 1]
        copies = ops.broadcast(x, shape, broadcast_spec="BIDIRECTIONAL")
        return ops.matmul(
            copies, stack, attributes["transpose_a"], attributes["transpose_b"]
        )

    _each(model, "MatMul", copied)


def is_gated(model: ov.Model) -> bool:
    """Whether the graph has gated parts: a product times the SiLU or GELU of another, as in most transformers."""
    pairs = (
        {node.input_value(i).get_node().get_type_name() for i in (0, 1)}
        for node in operations(model, "Multiply")
    )
    return any(
        pair & {"Swish", "Gelu"} and pair & {"MatMul", "Split", "VariadicSplit"}
        for pair in pairs
    )


def is_constant(node: Any) -> bool:
    """Whether a value depends on constants alone, as a compressed weight does."""
    if node.get_input_size() == 0:
        return bool(node.get_type_name() == "Constant")
    return all(is_constant(value.get_node()) for value in node.input_values())
