"""Rewrites change nothing but the operations."""

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

from kl_lens.targets import SessionSettings
from kl_lens.targets.openvino import rewrites
from kl_lens.targets.openvino.graph import graph_of
from kl_lens.targets.openvino.session import compile_graph, read_graph
from tests.families import tiny_model, token_ids
from tests.targets.openvino.conftest import assert_same_logits, reference


def run(model: ov.Model, path, *inputs: np.ndarray) -> np.ndarray:
    ov.save_model(model, path, compress_to_fp16=False)
    settings = SessionSettings(exact=True, threads=1)
    request = compile_graph(read_graph(path), settings).create_infer_request()
    request.infer(list(inputs))
    return request.get_output_tensor(0).data.copy()


@pytest.mark.parametrize(
    ("axes", "compressed"), [((1, -1, 8), True), ((-1, -1, 8), False), ((-1, 8), True)]
)
def test_activations_meet_a_stack_of_matrices(
    axes: tuple[int, ...], compressed: bool, tmp_path
) -> None:
    """Broadcasting inside the product is what the x86 plugin does wrong; so there must be none."""
    stack = np.random.default_rng(0).integers(-7, 7, (3, 5, 8)).astype(np.float32)
    weight = ops.constant(stack.astype(np.int8)) if compressed else ops.constant(stack)
    x = ops.parameter(ov.PartialShape(axes), np.float32)
    product = ops.matmul(
        x, ops.convert(weight, "f32") if compressed else weight, False, True
    )
    model = ov.Model([ops.result(product)], [x], "experts")
    for _ in range(2):  # the second time, nothing is left to do
        rewrites.apply(model)
        assert len(rewrites.operations(model, "Broadcast")) == 1
    for tokens in (6, 1, 9):
        values = np.random.default_rng(1).normal(size=(tokens, 8)).astype(np.float32)
        products = run(
            model, tmp_path / "m.xml", values.reshape([1] * (len(axes) - 2) + [tokens, 8])
        )
        np.testing.assert_allclose(products, values @ stack.transpose(0, 2, 1), atol=1e-5)


@pytest.mark.parametrize("shape", [[3, 4, 5], [-1, -1, 5]])
def test_only_the_operations_change(shape: list[int], tmp_path) -> None:
    x = ops.parameter(ov.PartialShape(shape), np.float32)
    model = ov.Model([ops.result(ops.softplus(x))], [x], "m")
    rewrites.apply(model)
    assert not rewrites.operations(model, "SoftPlus")
    values = (
        np.concatenate([np.linspace(-9, 9, 58), [-80, 80]])
        .astype(np.float32)
        .reshape(3, 4, 5)
    )
    np.testing.assert_allclose(
        run(model, tmp_path / "m.xml", values),
        np.logaddexp(0, values.astype(np.float64)),
        rtol=1e-6,
        atol=1e-12,
    )


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_static_graphs(family: str, tokens: int, tmp_path) -> None:
    model = tiny_model(family)
    graph = graph_of(model, static_tokens=tokens)
    rewrites.apply(graph)
    assert graph.inputs[0].get_shape() == ov.Shape([1, tokens])
    assert not rewrites.operations(graph, "ReadValue", "Assign", "If")
    if family == "mamba2":  # eight tokens are one chunk
        assert not rewrites.operations(graph, "TensorIterator")
    ids = token_ids(1, tokens)
    logits = run(graph, tmp_path / "static.xml", ids.numpy())[0]
    assert_same_logits(logits, reference(model, ids), 1e-4)
