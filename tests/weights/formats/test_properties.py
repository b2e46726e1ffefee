"""Properties that hold for every weight, looked for by hypothesis in the corners of float32."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kl_lens.weights.formats import get_format, known_formats

for _package in ("gguf", "xllamacpp"):
    pytest.importorskip(_package, reason="the extra 'gguf' is not installed")

# Kinds, not sizes: what differs in the group alone, or costs ggml seconds of tables, has its tests elsewhere.
QUICK = tuple(
    name
    for name in known_formats()
    if not name.startswith(("iq2", "iq3_s"))
    and name not in ("uint4-g128", "uint4-g64", "nf4-g128", "nf4-g64")
    and not name.startswith(
        ("int5", "int6", "uint8-", "int3-g64", "int3-g128", "int8-g32", "int8-g64")
    )
    and (not name.startswith("affine") or name in ("affine3-g32", "affine8-g32"))
)

quick = settings(max_examples=15)


@st.composite
def weights(
    draw: st.DrawFn, columns: st.SearchStrategy[int], rows: int = 3
) -> torch.Tensor:
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
    matrix = random.choice(
        np.float32(draw(st.lists(element, min_size=1, max_size=8))), shape
    )
    ordinary = random.random(shape) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.99, 1.0]))
    matrix = np.where(ordinary, random.standard_normal(shape, np.float32), matrix)
    size = st.sampled_from([1.0, 1.0, 1e-3, 1e-6, 1e-7, 1e-8, 1e-20, 1e-38, 1e3])
    sizes = draw(st.lists(size, min_size=shape[0], max_size=shape[0]))
    return torch.from_numpy(matrix * np.float32(sizes)[:, None]).clamp(-65504, 65504)


def columns_for(name: str) -> st.SearchStrategy[int]:
    block = get_format(name).block
    return st.integers(1, 40) if block == 1 else st.sampled_from([block, 2 * block])


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


@pytest.mark.parametrize("name", QUICK)
@given(data=st.data())
@quick
def test_values_are_finite_and_zero_stays_zero(name: str, data: st.DataObject) -> None:
    weight = data.draw(weights(columns_for(name)))
    weight[0] = 0.0
    values = get_format(name).roundtrip(weight)
    assert values.shape == weight.shape
    assert values.isfinite().all()
    assert (values[0] == 0).all()


@pytest.mark.parametrize("name", QUICK)
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
            assert torch.equal(
                together, torch.stack([getattr(expert, part) for expert in experts])
            )
    assert torch.equal(
        fmt.dequantize(stacked), torch.stack([fmt.dequantize(e) for e in experts])
    )
