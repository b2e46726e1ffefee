"""XAMBA's rewrites: CumBA and ReduBA change nothing but the operations, ActiBA stays inside its bound."""

from __future__ import annotations

from collections.abc import Callable

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


def test_softplus_is_exact(tmp_path) -> None:
    x = ops.parameter(ov.PartialShape([-1]), np.float32)
    model = ov.Model([ops.result(ops.softplus(x))], [x], "softplus")
    assert rewrites.apply(model, ())["exact_softplus"] == 1
    values = np.concatenate([np.linspace(-30, 30, 4001), [-80, 80]]).astype(np.float32)
    ours = run(model, tmp_path / "m.xml", values)
    right = np.logaddexp(0, values.astype(np.float64))
    np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("axes", [(1, -1, 8), (-1, -1, 8), (-1, 8)])
@pytest.mark.parametrize("compressed", [False, True])
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
    assert rewrites.equal_batches(ov.Model([ops.result(product)], [x, other], "plain")) == 0


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [[3, 4, 5], [-1, -1, -1]])
def test_cumba(axis: int, shape: list[int], tmp_path) -> None:
    x = ops.parameter(ov.PartialShape(shape), np.float32)
    model = ov.Model([ops.result(ops.cum_sum(x, ops.constant(np.int64(axis))))], [x], "cumsum")
    assert rewrites.apply(model, ("cumba",))["cumba"] == 1
    assert not rewrites.operations(model, "CumSum")
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    np.testing.assert_allclose(run(model, tmp_path / "m.xml", values), values.cumsum(axis), atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_reduba(kind: str, keep: bool, tmp_path) -> None:
    x = ops.parameter(ov.PartialShape([-1, 6]), np.float32)
    reduce = ops.reduce_sum if kind == "sum" else ops.reduce_mean
    model = ov.Model([ops.result(reduce(x, ops.constant(np.array([-1])), keep))], [x], "reduce")
    assert rewrites.apply(model, ("reduba",))["reduba"] == 1
    values = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = getattr(values, kind)(-1, keepdims=keep)
    np.testing.assert_allclose(run(model, tmp_path / "m.xml", values), expected, atol=1e-5)


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


def test_unknown_rewrites_are_refused() -> None:
    x = ops.parameter(ov.PartialShape([1]), np.float32)
    with pytest.raises(TargetError, match="no rewrite is called 'rumba'"):
        rewrites.apply(ov.Model([ops.result(x)], [x], "m"), ("rumba",))


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
