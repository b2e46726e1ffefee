"""Names, bytes, shapes, fallbacks and errors: what every format promises, whatever its numerics."""

import pytest
import torch
from tests.families import normal, slow

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import fitting_format, get_format, known_formats
from kl_lens.weights.formats.affine import AffineFormat
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.formats.integer import ZeroPointFormat
from kl_lens.weights.formats.scales import (
    scales_of,
    small_scales_of,
    with_scales,
    with_small_scales,
)

for _package in ("gguf", "xllamacpp"):
    pytest.importorskip(_package, reason="the extra 'gguf' is not installed")

# ggml aborts without the importance of columns for the first two, and builds tables for IQ2_S, six seconds long.
every_format = pytest.mark.parametrize(
    "name",
    [
        slow(name) if name == "iq2_s" else name
        for name in known_formats()
        if name not in ("iq2_xs", "iq2_xxs")
    ],
)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fp16", (3, 5), 30),
        ("int4", (3, 5), 8 + 3 * 2),  # 15 nibbles in 8 bytes
        ("int4-absmax", (3, 5), 8 + 3 * 4),
        ("uint4-g32", (768, 1536), 768 * 1536 // 2 + 768 * 48 * 2 + 768 * 24),
        ("uint2-g64", (3, 64), 3 * 16 + 3 * 2 + 1),
        ("int5-g64", (2, 3, 64), 6 * 40 + 6 * 2),
        ("mxfp4", (768, 1536), 768 * 1536 // 2 + 768 * 48),  # a byte for every 32 columns
        (
            "affine3-g64",
            (768, 1536),
            768 * 1536 * 3 // 8 + 768 * 24 * 4,
        ),  # a scale and a bias
    ],
)
def test_bytes(name: str, shape: tuple[int, ...], expected: int) -> None:
    assert get_format(name.upper()).bytes(shape) == expected


@every_format
def test_bytes_are_those_of_the_packed_weight(name: str) -> None:
    fmt = get_format(name)
    shape = (2, 3, 256)
    stored = fmt.quantize(normal(*shape))
    scales = 0 if stored.scales is None else stored.scales.nbytes
    zero_points = (
        fmt.pack_zero_points(stored).nbytes if isinstance(fmt, ZeroPointFormat) else 0
    )
    if isinstance(fmt, AffineFormat):
        assert stored.zero_points is not None
        zero_points = stored.zero_points.nbytes
    assert fmt.pack(stored).nbytes + scales + zero_points == fmt.bytes(shape)
    assert fmt.bits_per_weight(shape) == 8 * fmt.bytes(shape) / torch.Size(shape).numel()


@pytest.mark.parametrize(
    ("wanted", "columns", "fitting"),
    [
        ("int4-g128", 192, "int4-g64"),
        ("int4-g128", 48, "int8"),
        ("affine4-g128", 96, "affine4-g32"),
        ("uint2-g64", 96, "int4-g32"),
        ("uint8-g128", 48, "uint8"),
        ("mxfp4", 48, "int8"),
        ("q4_k", 256, "q4_k"),
        ("q4_k", 96, "q5_0"),
        ("q4_k", 48, "fp16"),
        ("iq2_xxs", 96, "iq4_nl"),
        ("q2_0", 96, "iq4_nl"),
    ],
)
def test_the_format_that_fits(wanted: str, columns: int, fitting: str) -> None:
    fmt, reason = fitting_format(get_format(wanted), (10, columns))
    assert fmt.name == fitting
    if wanted == fitting:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(f"{wanted}: {columns} columns do not divide")
        assert reason.endswith(f"stored as {fitting}")


@pytest.mark.parametrize("name", ["fp16", "uint4", "affine4-g32", "q4_k"])
@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (float("nan"), "has NaN or infinity"),
        (-float("inf"), "has NaN or infinity"),
        (-7e4, r"has 70000, above FP16's 65504"),
    ],
)
def test_bad_values_name_the_tensor(name: str, value: float, complaint: str) -> None:
    weight = torch.zeros(2, 256)
    weight[1, 7] = value
    with pytest.raises(FormatError, match=rf"^layers\.3\.x_proj\.weight: {complaint}"):
        get_format(name).quantize(weight, "layers.3.x_proj.weight")


@pytest.mark.parametrize("name", ["fp16", "nf4", "affine4-g32", "q8_0", "q4_k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_float_dtype_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    weight = normal(3, 256, seed=1).to(dtype).requires_grad_()
    copy = weight.detach().clone()
    values = get_format(name).roundtrip(weight)
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert torch.equal(values, get_format(name).roundtrip(copy.float()))
    assert torch.equal(weight, copy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_format
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (
        torch.randn(300, 512, generator=generator) * torch.logspace(-9, 3, 300)[:, None]
    )
    fmt = get_format(name)
    on_cpu = fmt.quantize(weight)
    on_gpu = fmt.quantize(weight.cuda())
    assert on_gpu.data.is_cuda
    assert torch.equal(on_cpu.data, on_gpu.data.cpu())
    for part, gpu_part in [
        (on_cpu.scales, on_gpu.scales),
        (on_cpu.zero_points, on_gpu.zero_points),
    ]:
        if part is not None and gpu_part is not None:
            assert torch.equal(part, gpu_part.cpu())
    assert torch.equal(fmt.dequantize(on_cpu), fmt.dequantize(on_gpu).cpu())


def _quantized(name: str, weight: torch.Tensor):  # type: ignore[no-untyped-def]
    fmt = get_format(name)
    if isinstance(fmt, GGUFFormat) and fmt.needs_importance:
        return fmt, fmt.quantize_with(weight, torch.ones(weight.shape[-1]))
    return fmt, fmt.quantize(weight)


# IQ2's tables take seconds to build; IQ2_XXS stands for them.
@pytest.mark.parametrize(
    "name", [name for name in known_formats() if name not in ("iq2_xs", "iq2_s")]
)
def test_values_are_linear_in_the_scales_and_the_scales_go_back_bit_for_bit(
    name: str,
) -> None:
    fmt, quantized = _quantized(name, normal(2, 512))
    scales = scales_of(fmt, quantized)
    if not scales:
        assert quantized.scales is None or quantized.scales.dtype != torch.float16
        return
    assert with_scales(fmt, quantized, scales).digest == quantized.digest
    doubled = with_scales(fmt, quantized, [2 * scale for scale in scales])
    assert torch.equal(fmt.dequantize(doubled), 2 * fmt.dequantize(quantized))
    nothing = with_scales(fmt, quantized, [torch.zeros_like(scale) for scale in scales])
    assert not fmt.dequantize(nothing).any()


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"])
def test_small_scales_go_back_bit_for_bit_and_values_follow_them(name: str) -> None:
    fmt, quantized = _quantized(name, normal(3, 512))
    small = small_scales_of(fmt, quantized)
    assert len(small) == len(scales_of(fmt, quantized))
    assert (
        with_small_scales(fmt, quantized, [part.values for part in small]).digest
        == quantized.digest
    )
    halved = with_small_scales(
        fmt, quantized, [(part.values / 2).trunc() * 2 for part in small]
    )
    single = with_small_scales(
        fmt, quantized, [(part.values / 2).trunc() for part in small]
    )
    assert torch.equal(fmt.dequantize(halved), 2 * fmt.dequantize(single))
    assert all(
        part.values.amin() >= part.lowest and part.values.amax() <= part.highest
        for part in small
    )
    assert small_scales_of(get_format("q4_0"), quantized) == ()
