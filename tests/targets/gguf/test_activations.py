"""Activation rounding: equal to ggml's own functions, applied where llama.cpp applies it, and predictive."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.activations import as_deployed, quantize_activations
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.session import open_session
from kl_lens.text.sources import wikitext2
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.ggml_types import as_blocks, ggml_types
from kl_lens.weights.formats.gguf_blocks import GGUFFormat, ggml_library
from tests.families import token_ids
from tests.targets.gguf.support import (
    FORMATS,
    kl,
    matrices,
    quantize_weights,
    tiny,
    torch_logits,
)

pytest.importorskip("gguf")


def _samples() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    yield torch.randn(7, 3, 512, generator=generator)
    yield torch.randn(4, 512, generator=generator) * torch.logspace(-6, 4, 4)[:, None]
    yield (
        torch.randn(2000, 512, generator=generator) * torch.logspace(-6, 4, 2000)[:, None]
    )
    ties = torch.randint(-254, 255, (100, 512), generator=generator).float()
    ties[:, ::32] = 254  # 127 times two: every odd number lies between two integers
    yield ties
    yield torch.cat(
        [torch.zeros(1, 256), torch.full((1, 256), -3.0), torch.eye(256)[:2] * 1e3]
    )


def _kernel(name: str, rows: np.ndarray, block: int, block_bytes: int) -> np.ndarray:
    """(blocks, bytes) from the function with which this processor's kernels round activations."""
    rows = np.ascontiguousarray(rows)
    blocks = np.zeros((rows.size // block, block_bytes), np.uint8)
    getattr(ggml_library(), name)(
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(blocks.ctypes.data),
        ctypes.c_int64(rows.size),
    )
    return blocks


def test_blocks_equal_the_kernels_on_this_processor() -> None:
    for values in _samples():
        blocks = _kernel(
            "quantize_row_q8_0", values.numpy(), 32, 34
        )  # a half-precision scale, 32 integers
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        expected = (blocks[:, 2:].view(np.int8) * scales).reshape(values.shape)
        assert np.array_equal(quantize_activations(values, "q8_0").numpy(), expected)
        blocks = _kernel(
            "quantize_row_q8_K", values.numpy(), 256, 292
        )  # scale, 256 integers, 16 sums
        scales = blocks[:, :4].copy().view(np.float32)
        expected = (blocks[:, 4:260].view(np.int8) * scales).reshape(values.shape)
        assert np.array_equal(quantize_activations(values, "q4_k").numpy(), expected)


class _Kernels(ctypes.Structure):
    """ggml's table of what the CPU does with a type (`ggml_type_traits_cpu`)."""

    _fields_ = (
        (
            "from_float",
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        ),
        (
            "vec_dot",
            ctypes.CFUNCTYPE(
                None, ctypes.c_int, *[ctypes.c_void_p, ctypes.c_size_t] * 3, ctypes.c_int
            ),
        ),
        ("vec_dot_type", ctypes.c_int),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("iq2_s", "iq2_xs")
        else name
        for name in FORMATS
    ],
)
def test_products_are_those_of_llama_cpp_s_kernels(name: str) -> None:
    """Rounded activations times the values of the format: what the kernel of that type computes, for every type."""
    library = ggml_library()
    library.ggml_cpu_init()
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Kernels)
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 512, generator=generator)
    values = torch.randn(4, 512, generator=generator)
    stored = (
        fmt.quantize_with(weight, torch.ones(512))
        if isinstance(fmt, GGUFFormat) and fmt.needs_importance
        else fmt.quantize(weight)
    )
    kernels = library.ggml_get_type_traits_cpu(ggml_types()[name].number).contents
    rounding = library.ggml_get_type_traits_cpu(kernels.vec_dot_type).contents
    blocks = np.zeros(4096, np.uint8)
    results = np.zeros((4, 8), np.float32)
    rows = as_blocks(stored).numpy()
    for row, found in zip(values.numpy(), results, strict=True):
        rounding.from_float(row.ctypes.data, blocks.ctypes.data, 512)
        for i, packed in enumerate(rows):
            kernels.vec_dot(
                512,
                found[i:].ctypes.data,
                0,
                packed.ctypes.data,
                0,
                blocks.ctypes.data,
                0,
                1,
            )
    exact = fmt.dequantize(stored).double()
    predicted = (quantize_activations(values, name).double() @ exact.T).numpy()
    size = np.abs(predicted).max()
    # The sums in Q8_1 are rounded once more (see activations.py); everything else is the order of additions.
    assert np.abs(results - predicted).max() < size * (
        3e-3 if name in ("q4_1", "q5_1") else 1e-6
    )
    assert (
        np.abs(results - (values.double() @ exact.T).numpy()).max() > size * 3e-3
    )  # the rule is not idle


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("mamba", "backbone.layers.1.mixer.dt_proj"),
        ("mamba", "backbone.embeddings"),
        ("mamba2", "lm_head"),
        ("jamba", "model.layers.0.mamba.dt_proj"),
        ("jamba with experts", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ("jamba with experts", "model.layers.1.feed_forward.experts.down_proj"),
        ("nemotron_h with experts", "model.layers.1.mixer.experts.down_proj"),
    ],
)
def test_each_component_alone_as_llama_cpp_computes_it(
    name: str, component: str, tmp_path: Path
) -> None:
    """One component in F16 or Q8_0 and everything else exact: the emulation finds the right inputs."""
    model = tiny(name)
    ids = token_ids(1, 40)
    original = torch_logits(model, ids)
    planned = "fp16" if component.endswith("dt_proj") else "q8_0"
    exact = dict.fromkeys(matrices(model), "fp32")
    artifact = export(model, Plan("p", exact | {component: planned}, "test"), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1, exact=True) as session:
        found = np.stack([session.step(int(token)) for token in ids[0]])
    formats = quantize_weights(model, artifact)
    assert formats == {component: planned}
    weights_only = torch_logits(model, ids)
    with as_deployed(model.model, formats):
        expected = torch_logits(model, ids)
    again = torch_logits(model, ids)
    assert np.array_equal(again, weights_only)  # nothing stays behind
    assert np.abs(found - expected).mean() < 0.2 * np.abs(found - weights_only).mean()
    assert np.abs(found - original).mean() > 10 * np.abs(found - expected).mean()


MORE = [
    (family, name)
    for family in ("mamba", "mamba2", "hybrid")
    for name in ("q8_0", "q6_k", "q4_k", "q4_0")
]


@pytest.mark.parametrize(
    ("family", "format_name", "windows", "tolerance"),
    [
        ("mamba", "q8_0", 2, 0.15),
        *(pytest.param(*each, 16, 0.04, marks=pytest.mark.slow) for each in MORE),
    ],
)
def test_predicted_kl_is_the_kl_of_the_file(
    family: str, format_name: str, windows: int, tolerance: float, tmp_path: Path
) -> None:
    """On a trained model. Rounding is chaotic: single tokens differ, and the mean over few of them by a few %."""
    model = load(f"reference:{family}")
    ids = model.tokenizer(wikitext2("test").joined()[: windows * 4000])["input_ids"]
    text = torch.tensor(ids[: windows * 256]).reshape(windows, 256)
    teacher = torch_logits(model, text)
    plan = Plan("p", {c.name: format_name for c in model.anatomy.candidates}, "test")
    artifact = export(model, plan, tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        found = np.concatenate([session.logits(window.tolist()) for window in text])
    formats = quantize_weights(model, artifact)
    weights_only = kl(teacher, torch_logits(model, text))[0]
    with as_deployed(model.model, formats):
        predicted, _ = kl(teacher, torch_logits(model, text))
    measured, _ = kl(teacher, found)
    assert abs(predicted - measured) < tolerance * measured
    if format_name == "q8_0":
        assert (
            weights_only < 0.7 * measured
        )  # and without the activations it would be far off
