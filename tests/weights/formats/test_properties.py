"""Properties that hold for every weight, looked for by hypothesis in the corners of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import get_format, known_formats
from kl_lens.weights.formats.microscaling import LEVELS as MICROSCALED, MicroscalingFormat
from kl_lens.weights.formats.normal_float import LEVELS

# Kinds, not sizes: what differs in the group alone, or costs ggml seconds of tables, has its tests elsewhere.
QUICK = tuple(
    name
    for name in known_formats()
    if not name.startswith(("iq2", "iq3_s"))
    and name not in ("uint4-g128", "uint4-g64", "nf4-g128", "nf4-g64")
    and (not name.startswith("affine") or name in ("affine3-g32", "affine8-g32"))
)
NNCF = ("int8", "int4", "int4-g32", "int8-g128")

quick = settings(max_examples=15)


def installed(name: str) -> bool:
    try:
        get_format(name).quantize(torch.zeros(1, 256))
    except FormatError:
        return False
    return True


def params(*names: str) -> list[Any]:
    missing = "the extra 'gguf' is not installed"
    return [pytest.param(n, marks=pytest.mark.skipif(not installed(n), reason=missing)) for n in names]


@st.composite
def weights(draw: st.DrawFn, columns: st.SearchStrategy[int], rows: int = 3) -> torch.Tensor:
    """Matrices whose rows differ wildly in size, with zeros, subnormals, ties and the largest FP16 number.

    Hypothesis picks a few elements; a seed spreads them over the matrix, among ordinary weights or not.
    """
    element = st.one_of(
        st.floats(-1, 1, width=32),
        st.integers(-16, 16).map(lambda n: n / 2),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 65504.0, -65504.0]),
    )
    shape = (draw(st.integers(1, rows)), draw(columns))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matrix = random.choice(np.float32(draw(st.lists(element, min_size=1, max_size=8))), shape)
    ordinary = random.random(shape) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.99, 1.0]))
    matrix = np.where(ordinary, random.standard_normal(shape, np.float32), matrix)
    size = st.sampled_from([1.0, 1.0, 1e-3, 1e-6, 1e-7, 1e-8, 1e-20, 1e-38, 1e3])
    sizes = draw(st.lists(size, min_size=shape[0], max_size=shape[0]))
    return torch.from_numpy(matrix * np.float32(sizes)[:, None]).clamp(-65504, 65504)


def columns_for(name: str) -> st.SearchStrategy[int]:
    block = get_format(name).block
    return st.integers(1, 40) if block == 1 else st.sampled_from([block, 2 * block])


@pytest.mark.parametrize("name", NNCF)
@given(data=st.data())
@quick
def test_nncf_error_bound(name: str, data: st.DataObject) -> None:
    """Half a step; one step where the other sign's extreme is clipped; plus the scale's FP16 rounding."""
    fmt = get_format(name)
    weight = data.draw(weights(columns_for(name)))
    stored = fmt.quantize(weight)
    levels = 2 ** (fmt.bits - 1)
    groups = weight.double().unflatten(-1, (-1, fmt.group_size or weight.shape[-1]))
    step = (groups.abs().amax(-1, keepdim=True) / levels).clamp(min=2.0**-23)
    assert stored.scales is not None
    sign = stored.scales.double().sign().unsqueeze(-1)
    clipped = groups / (sign * step) > levels - 0.5
    scale_rounding = torch.maximum(step * 2.0**-11, torch.tensor(2.0**-25).double())
    bound = torch.where(clipped, step, step / 2) + levels * scale_rounding + step * 1e-5
    error = (fmt.dequantize(stored).double() - weight.double()).abs().unflatten(-1, groups.shape[-2:])
    assert (error <= bound).all()


@pytest.mark.parametrize("name", NNCF)
@given(data=st.data())
@quick
def test_nncf_is_idempotent(name: str, data: st.DataObject) -> None:
    """The same integers and scales again, unless all values of a group are one positive number.

    The largest element lands on −f, so the stored FP16 scale is found again, and the products are exact.
    A positive constant, though, is clipped to f−1 and shrinks by one step on every trip.
    """
    fmt = get_format(name)
    once = fmt.quantize(data.draw(weights(columns_for(name))))
    values = fmt.dequantize(once)
    twice = fmt.quantize(values)
    assert once.scales is not None
    assert twice.scales is not None
    low, high = values.unflatten(-1, (*once.scales.shape[-1:], -1)).aminmax(dim=-1)
    stable = ~((low == high) & (high > 0))
    integers = [stored.data.unflatten(-1, (*once.scales.shape[-1:], -1)) for stored in (once, twice)]
    assert torch.equal(integers[0][stable], integers[1][stable])
    assert torch.equal(once.scales[stable], twice.scales[stable])


@pytest.mark.parametrize("name", ["uint4", "uint4-g32", "uint2-g64"])
@given(data=st.data())
@quick
def test_zero_points_bound_the_error_by_half_a_step(name: str, data: st.DataObject) -> None:
    """Whatever the signs: an extreme that the rounded zero point pushes out is clipped by half a step at most."""
    fmt = get_format(name)
    weight = data.draw(weights(columns_for(name)))
    stored = fmt.quantize(weight)
    groups = weight.double().unflatten(-1, (-1, fmt.group_size or weight.shape[-1]))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    top = 2**fmt.bits - 1
    step = ((high - low) / top).clamp(min=2.0**-23)
    scale_rounding = torch.maximum(step * 2.0**-11, torch.tensor(2.0**-25).double())
    error = (fmt.dequantize(stored).double() - weight.double()).abs().unflatten(-1, groups.shape[-2:])
    assert (error <= step * (0.5 + 1e-5) + top * scale_rounding).all()


@given(data=st.data())
@quick
def test_normal_floats_are_the_nearest_level(data: st.DataObject) -> None:
    fmt = get_format("nf4")
    weight = data.draw(weights(st.integers(1, 40)))
    stored = fmt.quantize(weight)
    scale = weight.double().abs().amax(-1, keepdim=True).clamp(min=2.0**-23)
    distances = (weight.double() / scale)[..., None] - torch.from_numpy(LEVELS).double()
    chosen = distances.abs().gather(-1, stored.data.long()[..., None])[..., 0]
    assert (chosen <= distances.abs().amin(-1) + 2e-7).all()  # borders are rounded to float32
    again = fmt.quantize(fmt.dequantize(stored))  # the largest element is a level: the scale is found again
    assert torch.equal(again.data, stored.data)
    assert torch.equal(again.scales, stored.scales)


@given(data=st.data())
@quick
def test_microscaled_floats_are_the_nearest_level(data: st.DataObject) -> None:
    fmt = get_format("mxfp4")
    assert isinstance(fmt, MicroscalingFormat)
    weight = data.draw(weights(st.just(64))).clamp(-49152, 49152)
    stored = fmt.quantize(weight)
    assert stored.scales is not None
    scales = fmt.scale_values(stored.scales).double()
    groups = weight.double().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    assert (largest <= 6 * scales).all()
    assert ((largest > 3 * scales) | (scales == 2.0**-23)).all()  # half of it would not do
    distances = ((groups / scales[..., None])[..., None] - torch.from_numpy(MICROSCALED).double()).abs()
    chosen = distances.gather(-1, stored.data.long().unflatten(-1, (-1, 32))[..., None])[..., 0]
    assert torch.equal(chosen, distances.amin(-1))
    assert torch.equal(fmt.roundtrip(fmt.dequantize(stored)), fmt.dequantize(stored))


@pytest.mark.parametrize("name", ["int8-absmax", "int4-absmax"])
@given(data=st.data())
@quick
def test_absmax_bound_and_integers(name: str, data: st.DataObject) -> None:
    """Half a step, and the same integers again; the scale itself may move by a bit of float32.

    Not so for rows below float32's normal range, where the scale has too few bits to divide by.
    """
    fmt = get_format(name)
    weight = data.draw(weights(st.integers(1, 40)))
    weight = weight * (weight.abs().amax(-1, keepdim=True) > 1e-30)
    stored = fmt.quantize(weight)
    step = weight.double().abs().amax(-1, keepdim=True) / (2 ** (fmt.bits - 1) - 1)
    values = fmt.dequantize(stored)
    assert ((values.double() - weight.double()).abs() <= step * (0.5 + 1e-5)).all()
    again = fmt.quantize(values)
    assert torch.equal(again.data, stored.data)
    torch.testing.assert_close(again.scales, stored.scales, rtol=3e-7, atol=0)
    assert stored.scales is not None
    assert (stored.scales[(weight == 0).all(-1)] == 1).all()


@given(data=st.data())
@quick
def test_fp16_is_ieee_half(data: st.DataObject) -> None:
    weight = data.draw(weights(st.integers(1, 40)))
    values = get_format("fp16").roundtrip(weight)
    assert np.array_equal(values.numpy(), weight.numpy().astype(np.float16).astype(np.float32))
    assert torch.equal(get_format("fp16").roundtrip(values), values)


@pytest.mark.parametrize("name", params("q8_0", "q4_0", "q5_0"))
@given(data=st.data())
@quick
def test_simple_gguf_blocks(name: str, data: st.DataObject) -> None:
    """Half a step (one where the other extreme is clipped) plus FP16 rounding, and idempotent values.

    Not at the very end of the range: 65504 comes back as 65532 from Q8_0, whose scale rounds up.
    The blocks themselves come back as well, unless the scale underflowed to zero: then the first trip's
    integers are lost, and the values are zero both times.
    """
    fmt = get_format(name)
    weight = data.draw(weights(columns_for(name))).clamp(-65000, 65000)
    stored = fmt.quantize(weight)
    values = fmt.dequantize(stored)
    levels = 127 if name == "q8_0" else 2 ** (fmt.bits - 1)
    blocks = weight.double().unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / levels
    largest_error = 0.5 if name == "q8_0" else 1.0
    scale_rounding = torch.maximum(step * 2.0**-11, torch.tensor(2.0**-25).double())
    error = (values.double() - weight.double()).abs().unflatten(-1, (-1, 32))
    assert (error <= step * (largest_error + 1e-5) + levels * scale_rounding).all()

    again = fmt.quantize(values)
    assert torch.equal(fmt.dequantize(again), values)
    bytes_per_block = fmt.bytes((1, 32))
    before = stored.data.unflatten(-1, (-1, bytes_per_block))
    after = again.data.unflatten(-1, (-1, bytes_per_block))
    scale_is_zero = (before[..., 0] == 0) & (before[..., 1] & 0x7F == 0)
    assert torch.equal(before[~scale_is_zero], after[~scale_is_zero])


@pytest.mark.parametrize("name", params(*QUICK))
@given(data=st.data())
@quick
def test_values_are_finite_and_zero_stays_zero(name: str, data: st.DataObject) -> None:
    weight = data.draw(weights(columns_for(name)))
    weight[0] = 0.0
    values = get_format(name).roundtrip(weight)
    assert values.shape == weight.shape
    assert values.isfinite().all()
    assert (values[0] == 0).all()


@pytest.mark.parametrize("name", params(*QUICK))
@given(data=st.data())
@settings(max_examples=6)
def test_rows_are_independent(name: str, data: st.DataObject) -> None:
    """So experts can be stacked, and rows split among threads or machines."""
    fmt = get_format(name)
    matrix = data.draw(weights(columns_for(name), rows=6))
    matrix = matrix[torch.arange(6) % len(matrix)]
    whole = fmt.quantize(matrix)
    by_row = [fmt.quantize(matrix[i : i + 1]) for i in range(6)]
    assert torch.equal(whole.data, torch.cat([row.data for row in by_row]))
    stacked = fmt.quantize(matrix.reshape(2, 3, -1))
    experts = [fmt.quantize(matrix[:3]), fmt.quantize(matrix[3:])]
    assert torch.equal(stacked.data, torch.stack([e.data for e in experts]))
    for part in ("scales", "zero_points"):
        if (together := getattr(stacked, part)) is not None:
            assert torch.equal(together, torch.stack([getattr(expert, part) for expert in experts]))
    assert torch.equal(fmt.dequantize(stacked), torch.stack([fmt.dequantize(e) for e in experts]))


@pytest.mark.parametrize("name", params("q6_k", "q5_k", "q4_k", "q3_k", "iq4_xs"))
def test_k_quants_settle(name: str) -> None:
    """K-quants search for their scales and are not idempotent; a second trip adds little to the first."""
    fmt = get_format(name)
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    once = fmt.roundtrip(weight)
    twice = fmt.roundtrip(once)
    first, second = (once - weight).square().mean(), (twice - once).square().mean()
    assert second < first / 4


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_rows(bits: int) -> None:
    """NNCF holds a negative constant exactly and clips a positive one by a whole step."""
    fmt = get_format(f"int{bits}")
    levels = 2 ** (bits - 1)
    values = fmt.roundtrip(torch.tensor([[0.5], [-0.5]]).expand(2, 7))
    assert torch.equal(values[0], torch.full((7,), 0.5 * (levels - 1) / levels))
    assert torch.equal(values[1], torch.full((7,), -0.5))


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "int8-absmax", "int4-absmax"])
@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (2, 1, 3)])
def test_thin_shapes(name: str, shape: tuple[int, ...]) -> None:
    values = get_format(name).roundtrip(-torch.ones(shape))
    torch.testing.assert_close(values, -torch.ones(shape), rtol=1e-6, atol=0)
