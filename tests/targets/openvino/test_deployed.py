"""The PyTorch emulation of the ARM kernels gives what the kernels give."""

import platform
from collections.abc import Callable

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
import torch

from kl_lens.measuring.perturbation import Perturbation, replacements, swapped
from kl_lens.targets import deployed
from kl_lens.targets.openvino import constants
from kl_lens.targets.openvino.profiles import (
    as_deployed,
    kernel_values,
    quantize_activations,
    quantize_groups,
)
from kl_lens.targets.openvino.session import (
    DEPLOYED,
    WHOLE_ROW,
    compile_graph,
    open_session,
    read_graph,
)
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.integer import ZeroPointFormat
from kl_lens.weights.recipes import parsed
from tests.families import token_ids
from tests.targets.openvino.conftest import reference

on_arm = pytest.mark.skipif(
    platform.machine() != "aarch64", reason="KleidiAI kernels exist on ARM only"
)


@on_arm
@pytest.mark.parametrize(
    "name", ["int8", "int4", "int4-g32", "int4-g64", "uint4-g32", "uint4-g64"]
)
def test_single_products(name: str, tmp_path) -> None:
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 128, generator=generator)
    node, _, _ = constants.integer_constant(fmt.quantize(weight), fmt, "w")
    x = ops.parameter(ov.PartialShape([1, -1, 128]), np.float32)
    model = ov.Model([ops.result(ops.matmul(x, node, False, True))], [x], "product")
    ov.save_model(model, tmp_path / "m.xml", compress_to_fp16=False)
    settings = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": WHOLE_ROW}
    compiled = compile_graph(
        read_graph(tmp_path / "m.xml"), "CPU", exact=True, threads=1, settings=settings
    )
    values = torch.randn(1, 9, 128, generator=generator)
    theirs = compiled([values.numpy()])[0]
    grouped = isinstance(fmt, ZeroPointFormat) and fmt.group_size
    rounded = (
        quantize_groups(values, fmt.group_size)
        if grouped
        else quantize_activations(values)
    )
    ours = (rounded @ kernel_values(fmt, fmt.quantize(weight)).T).numpy()
    plain = (values @ fmt.roundtrip(weight).T).numpy()
    largest = np.abs(theirs).max()
    assert np.abs(ours - theirs).max() < 1e-6 * largest
    assert np.abs(plain - theirs).max() > 1e-3 * largest  # the rule is not idle


@on_arm
@pytest.mark.parametrize(
    ("family", "plan"),
    [("mamba", "mixed"), ("jamba_experts", "mixed"), ("mamba", "unsigned")],
)
def test_whole_models(
    family: str, plan: str, exported: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = exported(family, plan)
    ids = token_ids(1, 40)
    monkeypatch.setitem(DEPLOYED, "KV_CACHE_PRECISION", "f32")
    session = open_session(case.folder, threads=1, cache=False)
    theirs = session.logits(ids[0].tolist())
    realised = parsed(
        {t.component: t.realised for t in case.artifact.tensors if t.realised != "fp32"}
    )
    model = case.model.model
    before = reference(model, ids)
    recipes = Perturbation(
        {
            c.name: realised[c.name]
            for c in case.model.anatomy.candidates
            if c.name in realised
        }
    )
    with (
        swapped(replacements(case.model, recipes, deployed("openvino"))),
        as_deployed(model, realised),
    ):
        ours = reference(model, ids)
    with swapped(replacements(case.model, recipes)):
        plain = reference(model, ids)
    span = np.ptp(theirs)
    error, idle = (np.median(np.abs(each - theirs)) for each in (ours, plain))
    # A value on the edge between two integers may fall to either side; everything else agrees to float32. In the
    # mixture of experts, whose float32 logits already differ by 1e-5, some value of nearly every token does.
    assert error < (0.25 * idle if family == "jamba_experts" else 1e-6 * span)
    assert np.abs(ours - theirs).max() < 0.02 * span
    np.testing.assert_array_equal(reference(model, ids), before)


def test_activations_keep_zero_and_stay_within_half_a_step() -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(1)) * 10
    x[0] = 0
    x[1] = x[1].abs()  # one-sided rows
    x[2, 5] = 0
    y = quantize_activations(x)
    assert torch.equal(y[0], x[0])
    assert y[2, 5] == 0
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    step = (high - low) / 255
    assert bool(((y - x).abs() <= 1.01 * step).all())
