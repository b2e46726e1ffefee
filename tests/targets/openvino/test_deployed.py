"""The PyTorch emulation of OpenVINO's kernels gives what the kernels give, and files say how they want to be run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
import torch

from kl_lens.base.errors import TargetError
from kl_lens.measuring.perturbation import Perturbation, replacements, swapped
from kl_lens.run.records import EXPORT_OPTIONS, Plan
from kl_lens.study.events import Events
from kl_lens.study.export import Files
from kl_lens.targets import SessionSettings, get_target, open_session
from kl_lens.targets.openvino import constants
from kl_lens.targets.openvino.folder import ACTIVATION_GROUPS, IR_FILE
from kl_lens.targets.openvino.kernels import as_deployed, quantize_groups
from kl_lens.targets.openvino.session import (
    compile_graph,
    read_graph,
    rounds_in_groups,
)
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import parsed
from tests.families import token_ids
from tests.targets.openvino.conftest import Exported, export, reference

IDS = token_ids(1, 40)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "rounded"),
    [
        ("int8", 40, 128, True),
        ("int8", 40, 80, True),
        ("int8", 40, 24, False),
        ("int8", 1, 64, False),
        ("int4", 40, 128, True),
        ("int4-g32", 40, 64, True),
        ("uint4-g64", 40, 128, True),
        ("uint2-g64", 40, 128, True),
        ("nf4", 40, 128, False),
    ],
)
def test_single_products(
    name: str, rows: int, columns: int, rounded: bool, tmp_path
) -> None:
    if rounded and not rounds_in_groups():
        pytest.skip("this processor's kernels leave activations alone")
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    node, _ = constants.integer_constant(fmt.quantize(weight), fmt, "w")
    x = ops.parameter(ov.PartialShape([1, -1, columns]), np.float32)
    model = ov.Model([ops.result(ops.matmul(x, node, False, True))], [x], "product")
    ov.save_model(model, tmp_path / "m.xml", compress_to_fp16=False)
    values = torch.randn(1, 9, columns, generator=generator)
    result = ov.Core().compile_model(tmp_path / "m.xml", "CPU")([values.numpy()])[0]
    rounded_product, plain = (
        (x @ fmt.roundtrip(weight).T).numpy() for x in (quantize_groups(values), values)
    )
    largest = np.abs(result).max()
    if rounded:
        assert np.abs(rounded_product - result).max() < 1e-6 * largest
        assert np.abs(plain - result).max() > 1e-3 * largest  # the rule is not idle
    elif rounds_in_groups():  # else in half precision
        assert np.abs(plain - result).max() < 2e-6 * largest


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("mamba", "mixed"),
        ("llama", "mixed"),
        ("jamba_experts", "mixed"),
        ("mamba", "unsigned"),
    ],
)
def test_whole_models(family: str, plan: str, exported: Callable[..., Exported]) -> None:
    case = exported(family, plan)
    target = get_target("openvino")
    realised = parsed(
        {t.component: t.realised for t in case.artifact.tensors if t.realised != "fp32"}
    )
    candidates = [c.name for c in case.model.anatomy.candidates if c.name in realised]
    recipes = {name: realised[name] for name in candidates}
    if not target.models_activations(SessionSettings(), recipes):
        pytest.skip("this processor's kernels leave activations alone")
    deployed = open_session(case.folder, threads=1).logits(IDS[0].tolist())
    model = case.model.model
    before = reference(model, IDS)
    with swapped(replacements(case.model, Perturbation(recipes))):
        plain = reference(model, IDS)
        with as_deployed(case.model, recipes):
            modelled = reference(model, IDS)
    span = np.ptp(deployed)
    error, idle = (np.median(np.abs(logits - deployed)) for logits in (modelled, plain))
    # A value on the edge between two integers may fall to either side; everything else agrees to float32.
    assert error < min(2e-6 * span, 0.1 * idle)
    assert np.abs(modelled - deployed).max() < 0.02 * span
    np.testing.assert_array_equal(reference(model, IDS), before)


def test_activations_keep_zero_and_stay_within_half_a_step() -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(1)) * 10
    x[0] = 0
    x[2, 5] = 0
    y = quantize_groups(x)
    assert torch.equal(y[0], x[0])
    assert y[2, 5] == 0
    assert torch.allclose(y[:, 32], x[:, 32])  # a group of its own
    step = x[:, :32].abs().amax(-1, keepdim=True) / 127
    assert bool(((y - x)[:, :32].abs() <= 0.51 * step).all())


@pytest.mark.parametrize(
    ("wanted", "number"), [(None, None), ("0", "0"), ("row", f"{2**64 - 1}")]
)
def test_every_program_runs_a_file_as_it_is_judged(
    wanted: str | None, number: str | None, exported: Callable[..., Exported]
) -> None:
    """With nothing set but what the file says: the runtime's own calls give our session's logits and settings."""
    options = {} if wanted is None else {"activation_groups": wanted}
    case = exported("llama", "mixed", **options)
    core = ov.Core()
    compiled = core.compile_model(case.folder / IR_FILE, "CPU")
    usual = str(core.get_property("CPU", "DYNAMIC_QUANTIZATION_GROUP_SIZE"))
    session = open_session(case.folder)
    for name in (
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "KV_CACHE_PRECISION",
        "INFERENCE_PRECISION_HINT",
    ):
        assert session.description[name.lower()] == str(compiled.get_property(name))
    assert session.description["dynamic_quantization_group_size"] == (number or usual)
    inputs = {
        "input_ids": IDS.numpy(),
        "attention_mask": np.ones(IDS.shape, np.int64),
        "beam_idx": np.zeros(1, np.int32),
    }
    logits = compiled(inputs)[0][0]
    distance = np.abs(session.logits(IDS[0].tolist()) - logits).max()
    assert distance < 1e-4 * np.ptp(logits)
    exact = open_session(case.folder, exact=True)
    assert exact.description["dynamic_quantization_group_size"] == "0"


def test_an_unknown_group_is_refused(exported: Callable[..., Exported], tmp_path) -> None:
    case = exported("llama")
    with pytest.raises(TargetError, match="--activation-groups 48: expected one of 0, "):
        export(
            case.model, Plan("x", {}, "test"), tmp_path / "out", activation_groups="48"
        )


def test_a_plan_made_for_fast_files_is_written_like_them(
    exported: Callable[..., Exported], tmp_path: Path
) -> None:
    model = exported("mamba").model
    plan = Plan("fast", {}, "test", notes={EXPORT_OPTIONS: {"activation_groups": "row"}})
    for options, number in (({}, f"{2**64 - 1}"), ({"activation_groups": "0"}, "0")):
        Files("openvino", Events(), options).written(model, plan, tmp_path / number)
        graph = read_graph(tmp_path / number / IR_FILE)
        assert graph.get_rt_info(ACTIVATION_GROUPS).astype(str) == number


def test_files_are_tried_out_as_they_are_judged(
    exported: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has other settings than several."""
    folder = exported("llama").folder  # an export compiles graphs, too
    calls = []
    whole = compile_graph

    def compiled(graph, settings):
        calls.append(settings)
        return whole(graph, settings)

    monkeypatch.setattr("kl_lens.targets.openvino.session.compile_graph", compiled)
    target = get_target("openvino")
    target.try_out(folder)
    target.open(folder, SessionSettings())
    tried, judged = calls
    assert tried == judged
    assert not read_graph(folder / IR_FILE).has_rt_info(["runtime_options"])
