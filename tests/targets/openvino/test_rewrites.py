"""XAMBA's rewrites: CumBA and ReduBA change nothing but the operations, ActiBA stays inside its bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
import torch

from kl_lens.base.errors import TargetError
from kl_lens.targets.openvino import rewrites
from kl_lens.targets.openvino.graph import StaticShape, graph_of
from kl_lens.targets.openvino.session import compile_graph, open_session, read_graph
from tests.families import tiny_model, token_ids
from tests.targets.openvino.conftest import assert_same_logits, reference


def run(model: ov.Model, path, *inputs: np.ndarray) -> np.ndarray:
    ov.save_model(model, path, compress_to_fp16=False)
    request = compile_graph(read_graph(path), "CPU", exact=True, threads=1).create_infer_request()
    request.infer(list(inputs))
    return request.get_output_tensor(0).data.copy()


@pytest.mark.parametrize(("axes", "compressed"), [((1, -1, 8), True), ((-1, -1, 8), False), ((-1, 8), True)])
def test_activations_meet_a_stack_of_matrices(axes: tuple[int, ...], compressed: bool, tmp_path) -> None:
    """Broadcasting inside the product is what the x86 plugin does wrong; so there must be none."""
    stack = np.random.default_rng(0).integers(-7, 7, (3, 5, 8)).astype(np.float32)
    weight = ops.constant(stack.astype(np.int8)) if compressed else ops.constant(stack)
    x = ops.parameter(ov.PartialShape(axes), np.float32)
    product = ops.matmul(x, ops.convert(weight, "f32") if compressed else weight, False, True)
    model = ov.Model([ops.result(product)], [x], "experts")
    assert rewrites.apply(model, ())["equal_batches"] == 1
    assert rewrites.equal_batches(model) == 0  # nothing left to do
    for tokens in (6, 1, 9):
        values = np.random.default_rng(1).normal(size=(tokens, 8)).astype(np.float32)
        found = run(model, tmp_path / "m.xml", values.reshape([1] * (len(axes) - 2) + [tokens, 8]))
        np.testing.assert_allclose(found, values @ stack.transpose(0, 2, 1), atol=1e-5)


def test_only_stacks_of_constants_are_given_copies() -> None:
    x = ops.parameter(ov.PartialShape([1, -1, 8]), np.float32)
    other = ops.parameter(ov.PartialShape([3, 8, 5]), np.float32)
    flat = ops.constant(np.ones((1, 8, 8), np.float32))
    product = ops.matmul(ops.matmul(x, flat, False, False), other, False, False)
    model = ov.Model([ops.result(product)], [x, other], "plain")
    assert rewrites.equal_batches(model) == 0
    with pytest.raises(TargetError, match="no rewrite is called 'rumba'"):
        rewrites.apply(model, ("rumba",))


def _cumulated(x: ov.Node, axis: int) -> ov.Node:
    return ops.cum_sum(x, ops.constant(np.int64(axis)))


def _reduced(x: ov.Node, kind: str, keep: bool) -> ov.Node:
    return (ops.reduce_sum if kind == "sum" else ops.reduce_mean)(x, ops.constant(np.array([-1])), keep)


@pytest.mark.parametrize("shape", [[3, 4, 5], [-1, -1, 5]])
@pytest.mark.parametrize(
    ("rewrite", "operation", "right"),
    [
        ("exact_softplus", ops.softplus, lambda x: np.logaddexp(0, x.astype(np.float64))),
        *(("cumba", partial(_cumulated, axis=a), partial(np.cumsum, axis=a)) for a in (0, 1, -1)),
        *(
            ("reduba", partial(_reduced, kind=k, keep=h), partial(getattr(np, k), axis=-1, keepdims=h))
            for k, h in (("sum", True), ("sum", False), ("mean", True), ("mean", False))
        ),
    ],
)
def test_only_the_operations_change(rewrite: str, operation, right, shape: list[int], tmp_path) -> None:
    x = ops.parameter(ov.PartialShape(shape), np.float32)
    model = ov.Model([ops.result(operation(x))], [x], "m")
    assert rewrites.apply(model, (rewrite,) if rewrite in rewrites.REWRITES else ())[rewrite] == 1
    assert not rewrites.operations(model, "CumSum", "ReduceSum", "ReduceMean", "SoftPlus")
    values = np.concatenate([np.linspace(-9, 9, 58), [-80, 80]]).astype(np.float32).reshape(3, 4, 5)
    tiny = 1e-12 if rewrite == "exact_softplus" else 1e-5
    np.testing.assert_allclose(run(model, tmp_path / "m.xml", values), right(values), rtol=1e-6, atol=tiny)


@pytest.mark.parametrize("function", ["silu", "softplus"])
def test_actiba_stays_inside_its_bound(function: str, tmp_path) -> None:
    values = np.concatenate([np.linspace(-14, 14, 9001), [-1e4, 1e4]]).astype(np.float32)
    wide = values.astype(np.float64)
    exact = wide / (1 + np.exp(-np.clip(wide, -700, None))) if function == "silu" else np.logaddexp(0, wide)
    bound = rewrites.table_error()[function]
    assert bound < 2e-3

    x = ops.parameter(ov.PartialShape([-1]), np.float32)
    node = ops.swish(x) if function == "silu" else ops.softplus(x)
    model = ov.Model([ops.result(node)], [x], "activation")
    assert rewrites.apply(model, ("actiba",))["actiba"] == 1
    ours = run(model, tmp_path / "m.xml", values)
    error = np.abs(ours - exact)[:-2].max()
    assert 0.5 * bound < error <= bound + 1e-5  # float32 rounding on top
    np.testing.assert_allclose(ours[-2:], exact[-2:], rtol=1e-6, atol=1e-9)


def test_cumba_and_reduba_keep_the_models_logits(exported: Callable) -> None:
    case = exported("mamba2", rewrites=("cumba", "reduba"))
    counts = case.artifact.settings["rewritten"]
    layers = len(case.model.chain)
    assert counts["cumba"] == layers  # inside the branch for many tokens
    assert counts["reduba"] == 2 * layers + 1  # two norms in each layer, and the last
    graph = read_graph(case.folder / "openvino_model.xml")
    assert not rewrites.operations(graph, "CumSum", "ReduceMean", "SoftPlus")
    ids = token_ids(1, 80)
    session = open_session(case.folder, exact=True, threads=1)
    assert_same_logits(session.logits(ids[0].tolist()), reference(case.model.model, ids), 1e-4)


def test_actibas_cost_is_measured(exported: Callable) -> None:
    case = exported("mamba", rewrites=("actiba",))
    cost = case.artifact.settings["actiba"]
    assert cost["error_bound"] == rewrites.table_error()
    assert 0 < cost["kl_nats_per_token"] < 1e-3
    assert cost["measured_on"] == "128 random tokens"
    graph = read_graph(case.folder / "openvino_model.xml")
    assert not rewrites.operations(graph, "Swish", "SoftPlus")
    ids = token_ids(1, 40)
    ours = open_session(case.folder, exact=True, threads=1).logits(ids[0].tolist())
    theirs = reference(case.model.model, ids)
    share = np.abs(ours - theirs).max() / np.ptp(theirs)
    assert 1e-5 < share < 0.02  # it does change the model, a little


@pytest.mark.parametrize(("family", "unroll"), [("mamba", True), ("mamba2", False)])
def test_static_graphs(family: str, unroll: bool, tmp_path) -> None:
    model = tiny_model(family)
    graph = graph_of(model, static=StaticShape(8, unroll=unroll))
    rewrites.apply(graph, ())
    assert graph.inputs[0].get_shape() == ov.Shape([1, 8])
    assert not rewrites.operations(graph, "ReadValue", "Assign", "If")
    if unroll or family == "mamba2":  # eight tokens are one chunk
        assert not rewrites.operations(graph, "TensorIterator")
    ids = token_ids(1, 8)
    ours = run(graph, tmp_path / "static.xml", ids.numpy())[0]
    assert_same_logits(ours, reference(model, ids), 1e-4)


def test_a_static_graph_without_its_head(tmp_path) -> None:
    model, ids = tiny_model("mamba"), token_ids(1, 4)
    graph = graph_of(model, static=StaticShape(4), with_head=False)
    rewrites.apply(graph, ())
    ours = run(graph, tmp_path / "static.xml", ids.numpy())[0]
    with torch.no_grad():
        right = model.backbone(ids).last_hidden_state[0].numpy()
    np.testing.assert_allclose(ours, right, atol=1e-4)
