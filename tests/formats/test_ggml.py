"""Our GGUF blocks against ggml's C code."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
import torch

from kl_lens.errors import FormatError
from kl_lens.formats import get_format
from kl_lens.formats.ggml import ggml_library, gguf_module, quantize_rows
from kl_lens.formats.gguf_blocks import GGUFFormat

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
pytest.importorskip("xllamacpp", reason="the extra 'gguf' is not installed")

FORMATS = ["q8_0", "q4_0", "q5_0", "q5_1", "q6_k", "q5_k", "q4_k"]


def gguf_format(name: str) -> GGUFFormat:
    fmt = get_format(name)
    assert isinstance(fmt, GGUFFormat)
    return fmt


def awkward_matrix() -> torch.Tensor:
    """Rows of many sizes and kinds. Nothing below 2^−60, where C's own result is not defined."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(64, 512, generator=random) * torch.logspace(-9, 4, 64)[:, None]
    w[0] = 0
    w[1], w[2] = 0.3, -0.3
    w[3], w[4] = w[43].abs(), -w[43].abs()
    w[5] = torch.randint(-16, 17, (512,), generator=random) / 2
    w[6, ::2], w[6, 1::2] = 1.0, -1.0
    w[7] = torch.randn(512, generator=random) * 10.0 ** torch.randint(-10, 3, (512,), generator=random)
    w[8, 9] = 65504
    return w.clamp(-65504, 65504)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_ggml_s(name: str) -> None:
    fmt = gguf_format(name)
    kind = gguf.GGMLQuantizationType[fmt.gguf_type]
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_equal_ggml_s(name: str) -> None:
    """gguf-py's blocks are C's; for K-quants, where C is what runs, nothing is lost around the call."""
    fmt = gguf_format(name)
    w = awkward_matrix()
    kind = gguf.GGMLQuantizationType[fmt.gguf_type]
    from_c = np.empty(fmt.bytes(w.shape), np.uint8)
    source = np.ascontiguousarray(w.numpy())
    ggml_library().ggml_quantize_chunk(int(kind), source.ctypes.data, from_c.ctypes.data, 0, *w.shape, None)
    assert np.array_equal(fmt.pack(fmt.quantize(w)), from_c)


@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_ggml_s(name: str) -> None:
    fmt = gguf_format(name)
    stored = fmt.quantize(awkward_matrix())
    c_name = fmt.name[:-1] + "K" if fmt.name.endswith("_k") else fmt.name
    dequantize = ggml_library()[f"dequantize_row_{c_name}"]
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    dequantize.restype = None
    blocks = fmt.pack(stored)
    values = np.empty(stored.shape, np.float32)
    dequantize(blocks.ctypes.data, values.ctypes.data, values.size)
    assert np.array_equal(fmt.dequantize(stored).numpy(), values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q8_0", 0.0054),
        ("q6_k", 0.0178),
        ("q5_k", 0.0363),
        ("q5_0", 0.043),
        ("q4_k", 0.0715),
        ("q4_0", 0.086),
    ],
)
def test_error_on_gaussian_weights(name: str, expected: float) -> None:
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    error = (get_format(name).roundtrip(w) - w).square().mean().sqrt()
    assert float(error) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-30, 1e-20, 1e-12])
def test_tiny_blocks_are_zero(name: str, size: float) -> None:
    w = torch.randn(2, 256, generator=torch.Generator().manual_seed(2)) * size
    fmt = get_format(name)
    stored = fmt.quantize(w)
    assert (fmt.dequantize(stored) == 0).all()
    if size <= 1e-20:  # below 2^−60: plain zeros on every processor, integers included
        assert torch.equal(stored.data, fmt.quantize(torch.zeros(2, 256)).data)


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    fmt, w = get_format("q4_k"), awkward_matrix()
    try:
        torch.set_num_threads(1)
        alone = fmt.quantize(w)
        torch.set_num_threads(3)
        assert torch.equal(fmt.quantize(w).data, alone.data)
    finally:
        torch.set_num_threads(before)


def test_a_wrong_size_is_noticed() -> None:
    kind = int(gguf.GGMLQuantizationType.Q4_K)
    with pytest.raises(FormatError, match="ggml wrote 288 bytes where 320 were expected"):
        quantize_rows(np.zeros((2, 256), np.float32), kind, row_bytes=160)


@pytest.mark.parametrize(("package", "name"), [("gguf", "q8_0"), ("xllamacpp", "q4_k")])
def test_a_missing_package_says_how_to_get_it(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say "not installed"
    gguf_module.cache_clear()
    ggml_library.cache_clear()
    try:
        with pytest.raises(FormatError, match=rf"need the package {package}: pip install 'kl-lens\[gguf\]'"):
            get_format(name).quantize(torch.zeros(1, 256))
        assert get_format(name).bytes((1, 256)) > 0  # planning needs no package
    finally:
        monkeypatch.undo()
        gguf_module.cache_clear()
        ggml_library.cache_clear()
