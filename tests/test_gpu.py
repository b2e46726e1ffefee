"""What runs on a GPU only: kernels against double precision, the engine against the plain one, precision, memory."""

import importlib

import numpy as np
import pytest
import torch
from torch.nn import functional

from kl_lens.base.errors import RunError
from kl_lens.judging.torch_session import TorchSession
from kl_lens.measuring.engines import Engine, FastEngine, PlainEngine
from kl_lens.measuring.metrics import TeacherRows, compare, compared_metrics
from kl_lens.measuring.objectives import OBJECTIVES, Objective
from kl_lens.measuring.perturbation import Perturbation, find_candidates
from kl_lens.measuring.pieces import Job, noise_floor
from kl_lens.measuring.sweep import Sweep
from kl_lens.measuring.tuning import TuningRates, tuned
from kl_lens.model import Chain, load
from kl_lens.model.kernels.rounded_scan import rounded_scan
from kl_lens.model.states import StateFormat
from kl_lens.run.folder import CALIBRATION, Run
from kl_lens.run.readings import summarise
from kl_lens.run.records import Plan
from kl_lens.targets import deployed, get_target
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.blocks import LAYOUTS
from kl_lens.weights.quantizers import InputStatistics, get_quantizer
from kl_lens.weights.recipes import Recipe, fitting_recipe
from tests.families import CONFIGS, tiny_model, token_ids
from tests.measuring.conftest import loaded, some_windows
from tests.measuring.test_engines import _one_of_each_kind
from tests.model.test_states import FORMATS as ROUNDED, MAMBA, MAMBA2, scan_inputs
from tests.planted import growing, larger

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: torch.cuda.is_available() is False",
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# -- kernels ------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("shape", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def test_rounded_scans_equal_those_of_the_cpu(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    from kl_lens.model.kernels.triton_rounded_scan import rounded_scan_gpu

    *inputs, skip = scan_inputs(shape, time=64)
    fmt = StateFormat.parse(name)
    expected = rounded_scan(*inputs, fmt, skip=skip)[0]
    actual = rounded_scan_gpu(
        *(tensor.cuda() for tensor in inputs), fmt, skip=skip.cuda()
    ).cpu()
    # Where a value lies between two levels, the last bit of the arithmetic decides, and later tokens inherit it.
    off = (actual - expected).abs() / expected.abs().amax()
    assert float(off.median()) < 1e-6
    assert float(off[:, :2].max()) < 1e-5
    assert float(off.max()) < {"4": 0.3, "8": 0.02}.get(name.strip("fpint")[:1], 2e-3)


@needs_gpu
def test_scans_convolution_and_norms_equal_double_precision() -> None:
    from kl_lens.model.kernels import triton_scan
    from tests.model.test_kernels import recurrence, recurrence2

    x = _random(2, 75, 130)[..., :65]
    dt = _random(2, 65, 75, seed=1).transpose(1, 2)
    gate = _random(2, 75, 65)
    rates = -_random(65, 16).exp()
    bias = _random(65) - 3
    skip = _random(65, seed=2)
    b = _random(2, 75, 40)[..., 3:19]
    c = _random(2, 75, 16, seed=3)
    step = functional.softplus(dt.double() + bias)
    y = triton_scan.selective_scan_gpu(
        x, dt, rates, b, c, dt_bias=bias, dt_softplus=True, skip=skip, gate=gate
    )
    expected = (recurrence(x, step, rates, b, c) + x * skip) * functional.silu(
        gate.double()
    )
    assert _error(y, expected) < 1e-6

    x = _random(2, 75, 6, 32)
    b = _random(2, 75, 2, 64, seed=1)
    c = _random(2, 75, 2, 64, seed=2)
    dt = _random(2, 75, 6, seed=3)
    rates = -_random(6).exp()
    bias = _random(6) - 2
    skip = _random(6, seed=4)
    y = triton_scan.head_scan_gpu(
        x,
        dt,
        rates,
        b,
        c,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=(0.01, 1.0),
        skip=skip,
    )
    step = functional.softplus(dt.double() + bias).clamp(0.01, 1.0)
    assert _error(y, recurrence2(x, step, rates, b, c) + x * skip[:, None]) < 2e-6

    x = _random(2, 75, 130)[..., 5:55]
    taps = _random(50, 4)
    bias = _random(50)
    convolved = triton_scan.causal_convolution_gpu(x, taps, bias, with_silu=True)
    turned = x.double().mT
    filters = taps.double()[:, None]
    offset = bias.double()
    expected = functional.conv1d(turned, filters, offset, padding=3, groups=50)[
        ..., :75
    ].mT
    assert _error(convolved, functional.silu(expected)) < 1e-6
    gated = x.double() * functional.silu(_random(2, 75, 50, seed=5).double())
    expected = bias * gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)
    assert (
        _error(
            triton_scan.rms_norm_gpu(x, bias, 1e-5, _random(2, 75, 50, seed=5)), expected
        )
        < 1e-6
    )


@needs_gpu
@pytest.mark.parametrize(
    ("module", "place", "family", "plant"),
    [
        ("triton_scan", "selective_scan_gpu", "mamba", growing),
        ("triton_scan", "head_scan_gpu", "mamba2", growing),
        ("triton_scan", "causal_convolution_gpu", "mamba2", larger),
        ("triton_scan", "rms_norm_gpu", "mamba", larger),
        (
            "swap",
            "chunked_scan",
            "mamba2",
            growing,
        ),  # for sizes that Triton's scan does not take
    ],
)
def test_a_kernel_that_is_wrong_on_a_gpu_is_found_and_not_used(
    module: str, place: str, family: str, plant, monkeypatch
) -> None:
    kernels = importlib.import_module(f"kl_lens.model.kernels.{module}")
    monkeypatch.setattr(kernels, place, plant(getattr(kernels, place), 1.0001))
    if module == "swap":
        monkeypatch.setattr(
            "kl_lens.model.kernels.triton_scan.fits_chunks", lambda *_: False
        )
    messages: list[str] = []
    chain = Chain(tiny_model(family).cuda(), warn=messages.append)
    assert not chain.uses_kernels()
    assert "is wrong here" in messages[0]
    assert len(messages) == 1


@needs_gpu
@pytest.mark.parametrize(
    ("precision", "factor"),
    [
        ("tf32x3", 1.001),
        ("tf32x3", 1.0001),
        ("tf32", 1.01),
    ],  # the others round more than 1.001
)
def test_wrong_products_are_found_and_torch_s_are_used(
    precision: str, factor: float, monkeypatch
) -> None:
    from kl_lens.model.kernels import triton_products

    monkeypatch.setattr(triton_products, "linear", larger(triton_products.linear, factor))
    model = loaded("mamba")
    messages = []
    model.model.cuda()
    model.warn = messages.append
    assert FastEngine(model, precision=precision).precision == "float32"
    assert TorchSession(model).precision == "float32"
    assert "matrix products" in messages[0]


@needs_gpu
def test_a_wrong_kl_on_a_gpu_is_found_and_computed_in_plain_torch(monkeypatch) -> None:
    from kl_lens.measuring import triton_metrics

    teacher = 5 * _random(40, 5000)
    targets = torch.arange(40).cuda()
    student = teacher + _random(40, 5000, seed=1)
    expected = compare(TeacherRows.of(teacher, targets), student, kernel=False)
    compared_metrics.cache_clear()
    monkeypatch.setattr(
        triton_metrics, "compare_logits", larger(triton_metrics.compare_logits, 1.0001)
    )
    try:
        assert not all(comparison.holds for comparison in compared_metrics("cuda"))
        np.testing.assert_array_equal(
            compare(TeacherRows.of(teacher, targets), student), expected
        )
    finally:
        compared_metrics.cache_clear()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", CONFIGS)
def test_right_kernels_are_used_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    model = loaded(family)
    model.warn = pytest.fail
    model.model.to("cuda", dtype)
    assert model.chain.uses_kernels()
    assert model.chain.uses_kernels(gradients=True)
    if dtype == torch.float32:
        for precision in ("tf32x3", "tf32"):
            assert FastEngine(model, precision=precision).precision == precision
    assert not model.chain.fault


@needs_gpu
@pytest.mark.parametrize("damage", [0.0, 1e-4, 0.1, 10.0])
def test_metrics_equal_those_of_the_cpu(damage: float) -> None:
    teacher = 5 * _random(40, 5000)
    student = (
        teacher + damage * _random(40, 5000, seed=1) + 30.0
    )  # a shift of all logits changes nothing
    targets = torch.arange(40).cuda()
    targets[7] = -1
    actual = compare(TeacherRows.of(teacher, targets), student)
    expected = compare(TeacherRows.of(teacher.cpu(), targets.cpu()), student.cpu())
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(
        actual[:, :2].mean(0), expected[:, :2].mean(0), rtol=1e-4, atol=1e-11
    )


# -- the engine ---------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("method", ["imatrix", "gptq"])
@pytest.mark.parametrize("name", [*LAYOUTS, "int4-g64", "uint4-g64", "nf4-g64"])
def test_weights_are_made_on_a_gpu_as_well_as_on_the_cpu(name: str, method: str) -> None:
    fmt = get_format(name)
    quantizer = get_quantizer(method)
    if quantizer.suits(fmt):
        pytest.skip(str(quantizer.suits(fmt)))
    weight = _random(300, 512).cpu()
    inputs = (_random(2000, 512) @ _random(512, 512)).cpu()
    moments = inputs.T @ inputs / 2000
    stored = [
        quantizer.quantize(w, fmt, "layer", InputStatistics(moments, (10**6,)))
        for w in (weight, weight.cuda())
    ]
    assert stored[1].data.is_cuda
    cpu_error, gpu_error = (weight - fmt.dequantize(tensors).cpu() for tensors in stored)
    if method == "imatrix":
        moments = moments.diagonal().diag()
    losses = [
        float(((errors @ moments) * errors).sum()) for errors in (cpu_error, gpu_error)
    ]
    assert losses[1] < 1.02 * losses[0]


@needs_gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_on_a_gpu_fast_equals_plain(family: str) -> None:
    model = loaded(family)
    ids = token_ids(5, 24)
    model.model.cuda()
    perturbations = _one_of_each_kind(model)
    results = []
    for engine in (PlainEngine(model), FastEngine(model)):
        engine.prepare(ids)
        results.append([summarise(windows) for windows in engine.measure(perturbations)])
    assert engine.precision == "tf32x3"
    for perturbation, plain, fast in zip(perturbations, *results, strict=True):
        for metric in ("kl_teacher_to_student", "kl_student_to_teacher", "mse"):
            assert fast[metric].value == pytest.approx(
                plain[metric].value, rel=1e-3, abs=1e-8
            ), perturbation
        assert fast["kl_max"].value == pytest.approx(
            plain["kl_max"].value, rel=1e-2, abs=1e-8
        ), "one token alone"


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "tf32x3"])
def test_on_a_gpu_an_objective_is_computed_beside_the_fused_kl(
    precision: str, monkeypatch
) -> None:
    """The other numbers stay the same to the last bit, and nothing falls back to plain torch."""

    def total_variation(original, perturbed, targets) -> torch.Tensor:
        return (original.softmax(-1) - perturbed.softmax(-1)).abs().sum(-1) / 2

    model = loaded("mamba")
    model.model.cuda()
    perturbations = _one_of_each_kind(model)

    def sums(engine: Engine) -> list[list[dict[str, float]]]:
        engine.prepare(token_ids(5, 24))
        return [
            [dict(w.sums) for w in windows] for windows in engine.measure(perturbations)
        ]

    without = sums(FastEngine(model, precision=precision))
    objective = Objective("variation", total_variation)
    monkeypatch.setitem(OBJECTIVES, objective.name, objective)
    expected = sums(PlainEngine(model))
    monkeypatch.setattr("kl_lens.measuring.engines.compare", pytest.fail)
    fused = sums(FastEngine(model, precision=precision))
    for windows, plain_windows in zip(fused, expected, strict=True):
        for window, plain in zip(windows, plain_windows, strict=True):
            assert window.pop(objective.name) == pytest.approx(
                plain[objective.name], rel=1e-3, abs=1e-5
            )
    assert fused == without


@needs_gpu
@pytest.mark.parametrize(("target", "recipe"), [("gguf", "q8_0"), ("openvino", "int8")])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "zamba2", "jamba_experts"])
def test_as_deployed_tensor_cores_give_what_float32_gives(
    family: str, target: str, recipe: str
) -> None:
    """But for ties: an activation next to the border between two integers may be rounded to the other one, and then
    others behind it. All candidates of a window share the first of them, so only windows are independent. The same
    happens on a CPU: with products off by 1e-6 at random, the sum of 5 windows moves by up to 1.4 %, that of 32 by
    0.2 %, and by 0.01 % where activations are not rounded."""
    if target == "openvino":
        pytest.importorskip("openvino")
    model = loaded(family)
    ids = token_ids(32, 24)
    model.model.cuda()
    singles = [
        c.perturbation for c in find_candidates(model.anatomy, [Recipe(recipe)])[0]
    ]
    kl = {}
    for engine in (
        PlainEngine(model, deployed=deployed(target)),
        FastEngine(model, deployed=deployed(target)),
    ):
        engine.prepare(ids)
        results = engine.measure(
            [
                *singles,
                Perturbation({n: r for p in singles for n, r in p.recipes.items()}),
            ]
        )
        kl[engine.precision] = np.array(
            [[w.kl for w in readings] for readings in results]
        )
    ratios = kl["tf32x3"].sum(1) / kl["float32"].sum(1)
    assert abs(np.median(ratios) - 1) < 0.01
    np.testing.assert_allclose(ratios, 1, atol=0.5, err_msg="a few values on a border")
    by_window = (kl["tf32x3"] - kl["float32"]).sum(0)
    error = by_window.std(ddof=1) / np.sqrt(len(by_window))
    assert abs(by_window.mean()) <= 4 * error, "it scatters around zero"
    assert error < 0.01 * kl["float32"].sum(0).mean(), (
        "and a difference of 4 % would be seen"
    )


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "tf32x3"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "zamba2", "jamba_experts"])
def test_on_a_gpu_weights_that_stay_on_disk_give_the_numbers_of_those_in_memory(
    family: str, precision: str, saved
) -> None:
    folder = saved(family)
    windows = some_windows(6, 40)
    divergences = []
    for options in ({}, {"weights": "disk", "memory_budget": 10}):
        model = load(folder, device="cuda", **options)
        engine = Job(
            windows.ids.numpy(), memory_budget=10**8, precision=precision
        ).engine_on(model)
        engine.prepare(windows.ids)
        results = engine.measure(
            [
                c.perturbation
                for c in find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])[
                    0
                ]
            ]
        )
        divergences.append(
            np.array([summarise(w)["kl_teacher_to_student"].value for w in results])
        )
    np.testing.assert_allclose(divergences[1], divergences[0], rtol=1e-4)


@needs_gpu
def test_the_noise_of_a_precision_is_measured_and_a_run_keeps_its_precision(
    tmp_path,
) -> None:
    model = loaded("mamba")
    windows = some_windows(4, 20)
    model.model.cuda()
    exact, coarse = (
        noise_floor(FastEngine(model, precision=p), windows.ids)["kl_teacher_to_student"]
        for p in ("tf32x3", "tf32")
    )
    assert 0 <= exact < coarse / 100
    candidates = find_candidates(model.anatomy, [Recipe("int8")])[0][:3]
    with Run.create(tmp_path) as run:
        assert (
            Sweep(model, run, precision="tf32").measure(candidates, windows).precision
            == "tf32"
        )
        assert Sweep(model, run).measure(candidates, windows).precision == "tf32", (
            "what the run has"
        )
        with pytest.raises(
            RunError,
            match="another precision of matrix products: precision is 'tf32' there",
        ):
            Sweep(model, run, precision="tf32x3").measure(candidates, windows)
    with Run.create(tmp_path / "chosen") as run:
        result = Sweep(model, run).measure(candidates, windows)
        assert result.precision == "tf32x3"
        assert run.load("noise", CALIBRATION)["kl_teacher_to_student"] < coarse / 100


@needs_gpu
@pytest.mark.parametrize(
    ("target", "recipe"), [("gguf", "q8_0"), ("openvino", "int8"), ("mlx", "affine8-g32")]
)
@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1"])
def test_a_model_on_a_gpu_is_exported_as_from_the_cpu(
    tmp_path, family, target, recipe
) -> None:
    pytest.importorskip(target)
    tiny = tiny_model(family)
    tiny.config.mamba_rms_norm = False  # llama.cpp has no such norm before the gate
    tiny = type(tiny)(tiny.config)
    tiny.save_pretrained(tmp_path / "model")
    exported = []
    for device in ("cpu", "cuda"):
        model = load(tmp_path / "model", device=device)
        plan = Plan("all", {c.name: recipe for c in model.anatomy.candidates}, "test")
        options = {"include_tokenizer": False} if target == "gguf" else {}
        exported.append(
            get_target(target).export(model, plan, tmp_path / device, **options)
        )
    if target != "openvino":  # a GPU divides in another way, so single codes may differ
        from_cpu, from_gpu = (
            [(t.runtime_name, t.realised, t.bytes) for t in artifact.tensors]
            for artifact in exported
        )
    else:
        from_cpu, from_gpu = (
            [t.digest for t in artifact.tensors] for artifact in exported
        )
    assert from_cpu == from_gpu


@needs_gpu
@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1"])
def test_on_a_gpu_tuning_gives_what_it_gives_on_a_cpu(tmp_path, family) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    scales = []
    for device in ("cpu", "cuda"):
        model = load(tmp_path / "model", device=device)
        plan = {
            c.name: fitting_recipe(Recipe("int8"), c.shape)[0]
            for c in model.anatomy.candidates
        }
        tensors = tuned(
            model, plan, token_ids(8, 40), TuningRates(epochs=1, batch=4, steps=1)
        )
        scales.append(
            {name: quantized.scales.cpu().float() for name, quantized in tensors.items()}
        )
    assert scales[0].keys() == scales[1].keys()
    for name, on_cpu in scales[0].items():
        torch.testing.assert_close(scales[1][name], on_cpu, rtol=5e-3, atol=0)
