"""MLX's affine formats are what `mx.quantize` stores and `mx.dequantize` computes with, bit for bit."""

import numpy as np
import pytest
import torch
from tests.families import normal

from kl_lens.weights.formats import Quantized, get_format
from kl_lens.weights.formats.affine import BITS
from kl_lens.weights.formats.integer import GROUPS
from kl_lens.weights.quantizers import InputStatistics, get_quantizer

mx = pytest.importorskip("mlx.core", reason="needs the extra mlx")

NAMES = [f"affine{bits}-g{group}" for bits in BITS for group in GROUPS]


def _weight() -> torch.Tensor:
    weight = normal(64, 256) * 0.05
    weight[0] = 0.0
    weight[1] = 0.3
    weight[2] = -0.3
    weight[3], weight[4] = weight[3].abs(), -weight[4].abs()
    weight[5, :128] = 0.0
    weight[6] *= 1e-6
    weight[7] *= 1e5
    weight[8, ::7] = 3e-8  # float16's smallest numbers
    return weight


def _values(name: str, stored: Quantized) -> np.ndarray:
    """What MLX makes of the bytes, in float32."""
    fmt = get_format(name)
    rows = stored.shape[0]
    packed = mx.array(fmt.pack(stored).view(np.uint32).reshape(rows, -1))
    assert stored.scales is not None
    assert stored.zero_points is not None
    scales, biases = (
        mx.array(part.float().numpy()) for part in (stored.scales, stored.zero_points)
    )
    return np.array(
        mx.dequantize(packed, scales, biases, group_size=fmt.group_size, bits=fmt.bits)
    )


@pytest.mark.parametrize("name", NAMES)
def test_rounding_to_nearest_is_that_of_mlx(name: str) -> None:
    fmt = get_format(name)
    weight = _weight()
    stored = fmt.quantize(weight)
    codes, scales, biases = mx.quantize(
        mx.array(weight.numpy()).astype(mx.float16),
        group_size=fmt.group_size,
        bits=fmt.bits,
    )
    assert fmt.pack(stored).tobytes() == np.array(codes).tobytes()
    for part, mlx_part in ((stored.scales, scales), (stored.zero_points, biases)):
        assert part is not None
        assert part.numpy().tobytes() == np.array(mlx_part).tobytes()
    np.testing.assert_array_equal(fmt.dequantize(stored).numpy(), _values(name, stored))


@pytest.mark.parametrize("name", ["affine2-g64", "affine3-g32", "affine8-g128"])
@pytest.mark.parametrize("method", ["search", "gptq"])
def test_learnt_weights_are_what_mlx_computes_with(name: str, method: str) -> None:
    weight = _weight()[9:33]
    inputs = normal(2048, 256, seed=1) * torch.linspace(0.1, 2, 256)
    statistics = InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))
    stored = get_quantizer(method).quantize(weight, get_format(name), "layer", statistics)
    np.testing.assert_array_equal(
        get_format(name).dequantize(stored).numpy(), _values(name, stored)
    )
