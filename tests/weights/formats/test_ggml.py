"""Our GGUF blocks against ggml's C code."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import normal, slow
from torch import Tensor

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import Quantized, get_format, known_formats
from kl_lens.weights.formats.blocks import LAYOUTS
from kl_lens.weights.formats.ggml_types import as_blocks, from_blocks, ggml_types
from kl_lens.weights.formats.gguf_blocks import GGUFFormat, ggml_library
from kl_lens.weights.quantizers import InputStatistics
from kl_lens.weights.recipes import Recipe

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
pytest.importorskip("xllamacpp", reason="the extra 'gguf' is not installed")

SIMPLE = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"]
FORMATS = [
    *SIMPLE,
    "q6_k",
    "q5_k",
    "q4_k",
    "q3_k",
    "q2_k",
    "iq4_nl",
    "iq4_xs",
    "iq3_s",
    "iq3_xxs",
]
# The tables that ggml builds for its two-bit types take one, three and six seconds.
TWO_BITS = [
    "iq2_xxs",
    *(slow(name) for name in ("iq2_xs", "iq2_s")),
]
EVERY = [*FORMATS, *TWO_BITS]


def gguf_format(name: str) -> GGUFFormat:
    fmt = get_format(name)
    assert isinstance(fmt, GGUFFormat)
    return fmt


def awkward_matrix() -> Tensor:
    """Rows of many sizes and kinds. Nothing below 2^−60, where C's own result is not defined."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(64, 512, generator=random) * torch.logspace(-9, 4, 64)[:, None]
    w[0] = 0
    w[1] = 0.3
    w[2] = -0.3
    w[3], w[4] = w[43].abs(), -w[43].abs()
    w[5] = torch.randint(-16, 17, (512,), generator=random) / 2
    w[6, ::2] = 1.0
    w[6, 1::2] = -1.0
    w[7] = torch.randn(512, generator=random) * 10.0 ** torch.randint(
        -10, 3, (512,), generator=random
    )
    w[8, 9] = 65504
    return w.clamp(-65504, 65504)


def importance() -> Tensor:
    return torch.rand(512, generator=torch.Generator().manual_seed(5)) ** 4


def encoded(fmt: GGUFFormat, w: Tensor) -> Quantized:
    return fmt.quantize_with(w, importance()) if fmt.needs_importance else fmt.quantize(w)


def by_ggml(
    kind: int, size: int, w: Tensor, columns: np.ndarray | None = None
) -> np.ndarray:
    """The blocks that ggml itself makes of a matrix."""
    blocks = np.empty(size, np.uint8)
    source = np.ascontiguousarray(w.numpy())
    weights = None if columns is None else columns.ctypes.data
    ggml_library().ggml_quantize_chunk(
        kind, source.ctypes.data, blocks.ctypes.data, 0, *w.shape, weights
    )
    return blocks


@pytest.mark.parametrize("name", [*FORMATS, "iq2_xxs", "iq2_xs", "iq2_s"])
def test_sizes_are_ggml_s(name: str) -> None:
    fmt = gguf_format(name)
    kind = gguf.GGMLQuantizationType[fmt.name.upper()]
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert fmt.needs_importance == ggml_library().ggml_quantize_requires_imatrix(
        int(kind)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_equal_ggml_s(name: str) -> None:
    """gguf-py's blocks are C's; where C is what runs, nothing is lost around the call."""
    fmt = gguf_format(name)
    w = awkward_matrix()
    kind = gguf.GGMLQuantizationType[fmt.name.upper()]
    from_c = by_ggml(int(kind), fmt.bytes(w.shape), w)
    assert np.array_equal(fmt.pack(fmt.quantize(w)), from_c)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_bytes_stand_for_the_values_that_gguf_py_gives_them(name: str) -> None:
    fmt = gguf_format(name)
    data = torch.randint(
        0, 256, (40, 4 * fmt.block_bytes), generator=torch.Generator().manual_seed(0)
    ).byte()
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(
            data.numpy(), gguf.GGMLQuantizationType[fmt.name.upper()]
        )
    values = fmt.dequantize(Quantized(name, expected.shape, data)).numpy()
    finite = np.isfinite(expected)
    assert np.array_equal(
        values[finite].view(np.uint32), expected[finite].view(np.uint32)
    )


@pytest.mark.parametrize("name", EVERY)
def test_blocks_with_importance_equal_ggml_s(name: str) -> None:
    """And only its proportions count, down to the smallest and up to the largest numbers."""
    fmt = gguf_format(name)
    w = awkward_matrix()[9:].clamp(-3e4, 3e4)
    kind = gguf.GGMLQuantizationType[fmt.name.upper()]
    from_c = by_ggml(int(kind), fmt.bytes(w.shape), w, importance().numpy())
    stored = fmt.quantize_with(w, importance())
    assert np.array_equal(fmt.pack(stored), from_c)
    for power in (-100, 120):
        assert torch.equal(
            fmt.quantize_with(w, importance() * 2.0**power).data, stored.data
        )
    if not fmt.needs_importance:
        assert torch.equal(stored.data, fmt.quantize(w).data) == (
            not fmt.takes_importance
        )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda i: i[:100], r"importance has shape \(100,\) where \(512,\) was expected"),
        (lambda i: -i, "importance holds NaN, infinity or a negative number"),
        (lambda i: i / 0, "importance holds NaN, infinity or a negative number"),
        (lambda i: i * 0, "importance is zero for every column"),
    ],
)
def test_importance_that_ggml_would_choke_on(change: Any, complaint: str) -> None:
    with pytest.raises(FormatError, match=f"^{complaint}"):
        gguf_format("q4_k").quantize_with(torch.ones(4, 512), change(importance()))


def from_ggml(name: str, blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    c_name = name[:-1] + "K" if name.endswith("_k") else name
    dequantize = ggml_library()[f"dequantize_row_{c_name}"]
    dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    dequantize.restype = None
    values = np.empty(shape, np.float32)
    dequantize(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


@pytest.mark.parametrize("name", EVERY)
def test_values_equal_ggml_s(name: str) -> None:
    fmt = gguf_format(name)
    stored = encoded(fmt, awkward_matrix())
    values = from_ggml(name, fmt.pack(stored), stored.shape)
    assert np.array_equal(fmt.dequantize(stored).numpy(), values)


@pytest.mark.parametrize("recipe", ["q2_0", "q2_0+search", "mxfp4", "mxfp4+search"])
def test_types_that_are_groups_here_have_ggml_s_values_and_come_back(recipe: str) -> None:
    name = recipe.partition("+")[0]
    weight = awkward_matrix()[:, :192].reshape(2, 32, 192)
    statistics = InputStatistics(importance()[:192].diag(), (1000,))
    quantizer = Recipe.parse(recipe).quantizer
    fmt = get_format(name)
    stored = quantizer.quantize(weight, fmt, "layer", statistics)
    blocks = as_blocks(stored)
    assert blocks.numel() == fmt.bytes(weight.shape)
    values = from_ggml(name, blocks.numpy(), tuple(weight.shape))
    assert np.array_equal(fmt.dequantize(stored).numpy(), values)
    assert from_blocks(name, stored.shape, blocks).digest == stored.digest


def test_ggml_has_the_types_by_these_numbers() -> None:
    library = ggml_library()
    library.ggml_type_name.restype = ctypes.c_char_p
    for name in set(ggml_types()).intersection(known_formats()):
        kind = ggml_types()[name]
        assert library.ggml_type_name(kind.number).decode().upper() == kind.name
        assert library.ggml_blck_size(kind.number) == kind.block
        assert library.ggml_type_size(kind.number) == kind.bytes


def test_two_bits_with_a_searched_scale_lose_a_quarter_of_what_ggml_loses() -> None:
    """Which knows no data either, and leaves one of four levels unused."""
    weight = normal(64, 512)
    blocks = by_ggml(ggml_types()["q2_0"].number, 64 * 512 // 64 * 18, weight)
    error = np.square(from_ggml("q2_0", blocks, (64, 512)) - weight.numpy()).mean()
    search = Recipe.parse("q2_0+search")
    statistics = InputStatistics(torch.eye(512), (1000,))
    stored = search.quantizer.quantize(weight, search.grid, "layer", statistics)
    search_error = (search.grid.dequantize(stored) - weight).square().mean()
    assert search_error < 0.26 * error
    assert search_error**0.5 < 0.3515


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-30, 1e-20, 1e-12])
def test_tiny_blocks_are_zero(name: str, size: float) -> None:
    w = normal(2, 256, seed=2) * size
    fmt = get_format(name)
    stored = fmt.quantize(w)
    assert (fmt.dequantize(stored) == 0).all()
    if size <= 1e-20:  # below 2^−60: plain zeros on every processor, integers included
        assert torch.equal(stored.data, fmt.quantize(torch.zeros(2, 256)).data)
