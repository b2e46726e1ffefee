"""Image classifiers by the same lens as language models, and MambaVision as it was published."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kl_lens.measuring.engines import FastEngine, PlainEngine
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.model import ImageTask, load
from kl_lens.model.kernels.checking import InDouble
from kl_lens.weights.recipes import Recipe
from tests.classifiers import CLASSES, MODELS, PROCESSOR, classifier, mambavision, save
from tests.model.test_kernels import recurrence


def _pixels(ids: Tensor) -> Tensor:
    return torch.from_numpy(ImageTask(PROCESSOR, CLASSES).inputs(ids.flatten().tolist()))


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_form_a_chain_that_gives_the_models_own_logits(name: str) -> None:
    model = classifier(name)
    ids = model.task.sample(model.model, 2, 3)
    assert len(model.chain) >= 2
    assert model.chain.doubt(ids) is None
    output = model.model(_pixels(ids))
    logits = (output if isinstance(output, Tensor) else output.logits).view(2, 3, CLASSES)
    calls = model.chain.calls(ids)
    for middle in range(len(model.chain) + 1):
        half = model.chain.run(calls.hidden, calls, 0, middle)
        final = model.chain.finish(model.chain.run(half, calls, middle), calls)
        torch.testing.assert_close(
            model.chain.logits(final), logits, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
def test_kl_of_both_engines_is_that_of_two_forwards_in_float64(name: str) -> None:
    model = classifier(name)
    ids = model.task.sample(model.model, 3, 4)
    candidates = find_candidates(model.anatomy, [Recipe("int4")])[0][::3]
    perturbations = [c.perturbation for c in candidates]
    results = []
    for engine in (FastEngine(model), PlainEngine(model)):
        engine.prepare(ids)
        results.append(
            np.array(
                [[w.kl for w in windows] for windows in engine.measure(perturbations)]
            )
        )
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-9)
    wide = classifier(name)
    wide.model.double()
    pixels = _pixels(ids).double()

    def log_p() -> Tensor:
        output = wide.model(pixels)
        return (
            (output if isinstance(output, Tensor) else output.logits)
            .log_softmax(-1)
            .view(3, 4, -1)
        )

    teacher = log_p()
    for candidate, measured in zip(candidates, results[0], strict=True):
        parameter = wide.model.get_parameter(candidate.component.weight)
        recipe = candidate.recipe
        original = parameter.data
        parameter.data = recipe.grid.dequantize(
            model.weights.quantized(candidate.component.name, recipe)
        ).double()
        expected = (teacher.exp() * (teacher - log_p())).sum((1, 2)).numpy()
        parameter.data = original
        np.testing.assert_allclose(measured, expected, rtol=5e-3, atol=1e-7)


def test_mambavision_is_the_published_function_under_the_published_names() -> None:
    """Against a forward written from the paper's equations, on weights read by their published names."""
    torch.manual_seed(1)
    model = mambavision(layer_scale=0.5, layer_scale_conv=0.5).double().eval()
    weights = {
        name.removeprefix("model."): value for name, value in model.state_dict().items()
    }
    images = torch.randn(
        2, 1, 10, 7, dtype=torch.float64
    )  # windows of 4 do not fit: padded

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(
            x, weights[f"{name}.weight"], weights.get(f"{name}.bias")
        )

    def convolution(x: Tensor, name: str, stride: int = 1) -> Tensor:
        return functional.conv2d(
            x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), stride, 1
        )

    def batch_norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        names = ("running_mean", "running_var", "weight", "bias")
        return functional.batch_norm(x, *(weights[f"{name}.{n}"] for n in names), eps=eps)

    def mixer(x: Tensor, name: str) -> Tensor:
        def both_ways(y: Tensor, kernel: str) -> Tensor:
            padded = functional.pad(y, (0, 0, 1, 1))
            taps = weights[f"{name}.{kernel}.weight"][:, 0]
            return functional.silu(
                sum(padded[:, k : k + y.shape[1]] * taps[:, k] for k in range(3))
            )

        halves = linear(x, f"{name}.in_proj").chunk(2, -1)
        u = both_ways(halves[0], "conv1d_x")
        z = both_ways(halves[1], "conv1d_z")
        rank = math.ceil(x.shape[-1] / 16)
        step, b, c = linear(u, f"{name}.x_proj").split([rank, 8, 8], -1)
        step = linear(step, f"{name}.dt_proj") + weights[f"{name}.dt_proj.bias"]
        rates = -weights[f"{name}.A_log"].exp()
        scanned = recurrence(u, functional.softplus(step), rates, b, c)
        outputs = scanned + weights[f"{name}.D"] * u
        return linear(torch.cat([outputs, z], -1), f"{name}.out_proj")

    def attention(x: Tensor, name: str, heads: int) -> Tensor:
        query, key, value = (
            part.view(*x.shape[:2], heads, -1).transpose(1, 2)
            for part in linear(x, f"{name}.qkv").chunk(3, -1)
        )
        scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        return linear((scores @ value).transpose(1, 2).reshape(x.shape), f"{name}.proj")

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    def block(x: Tensor, name: str, attends: bool) -> Tensor:
        inner = layer_norm(x, f"{name}.norm1")
        mixed = (
            attention(inner, f"{name}.mixer", 2)
            if attends
            else mixer(inner, f"{name}.mixer")
        )
        x = x + weights[f"{name}.gamma_1"] * mixed
        inner = functional.gelu(linear(layer_norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        return x + weights[f"{name}.gamma_2"] * linear(inner, f"{name}.mlp.fc2")

    x = images
    patch = "patch_embed.conv_down"
    for index in (0, 3):
        x = convolution(x, f"{patch}.{index}")
        x = batch_norm(x, f"{patch}.{index + 1}", 1e-4).relu()
    first = "levels.0.blocks.0"
    inner = batch_norm(convolution(x, f"{first}.conv1"), f"{first}.norm1")
    inner = functional.gelu(inner, approximate="tanh")
    inner = batch_norm(convolution(inner, f"{first}.conv2"), f"{first}.norm2")
    x = x + weights[f"{first}.gamma"][:, None, None] * inner
    x = convolution(x, "levels.0.downsample.reduction.0", stride=2)  # 5 × 4
    padded = functional.pad(x, (0, 0, 0, 3))
    rows = []
    for top in (0, 4):
        window = padded[:, :, top : top + 4].flatten(2).transpose(1, 2)
        for index in range(3):  # of three blocks the last attends
            window = block(window, f"levels.1.blocks.{index}", attends=index == 2)
        rows.append(window.transpose(1, 2).reshape(2, -1, 4, 4))
    x = batch_norm(torch.cat(rows, 2)[:, :, :5], "norm").mean((2, 3))
    with torch.no_grad(), InDouble():
        torch.testing.assert_close(
            model(images).logits, linear(x, "head"), rtol=1e-9, atol=1e-9
        )


def test_a_folder_in_the_hubs_layout_opens_without_its_own_code(tmp_path: Path) -> None:
    """As `nvidia/MambaVision-*` have it: auto_map to code that needs CUDA, no preprocessor_config.json."""
    folder = save(tmp_path / "hub", classifier("mambavision"))
    (folder / "preprocessor_config.json").unlink()
    config = folder / "config.json"
    extra = '"auto_map": {"AutoModelForImageClassification": "modeling_mambavision.X"}, "mean": [0.3], "std": [0.4], '
    config.write_text(
        config.read_text().replace("{", '{ "input_resolution": [1, 8, 8], ' + extra, 1)
    )
    model = load(folder)
    assert model.task.name == "image"
    assert model.classifier is not None
    assert model.classifier.shape == (1, 8, 8)
    ids = model.task.sample(model.model, 1, 2)
    expected = classifier("mambavision").model(_pixels(ids)).logits
    torch.testing.assert_close(model.chain.full_logits(ids)[0], expected)


def test_the_reference_classifier_reads_digits_as_its_card_says() -> None:
    model = load("reference:vision")
    windows = model.task.from_start("digits:test", length=437)
    right = model.chain.full_logits(windows.ids).argmax(-1) == model.task.targets(
        windows.ids
    )
    assert float(right.double().mean()) > 0.97
    assert sum(path.stat().st_size for path in model.folder.iterdir()) < 10**6
