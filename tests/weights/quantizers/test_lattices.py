"""Error feedback for ggml's IQ2 and IQ3 types: bytes that ggml decodes, and less loss than with importance alone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kl_lens.weights.formats import Quantized, get_format
from kl_lens.weights.formats.gguf_blocks import ggml_library
from kl_lens.weights.formats.lattices import LATTICES, run_scales, with_codes
from kl_lens.weights.quantizers import InputStatistics, get_quantizer, lattice_rounding as lattices

pytest.importorskip("gguf")
# The first use of these two takes ggml seconds.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("iq2_s", "iq2_xs") else name for name in LATTICES
]
ROWS, COLUMNS = 4, 512


def _decoded_by_ggml(name: str, blocks: np.ndarray) -> np.ndarray:
    values = np.empty((len(blocks), 256), np.float32)
    decode = getattr(ggml_library(), f"dequantize_row_{name}")
    decode.argtypes, decode.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    decode(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


def _statistics(seed: int = 0) -> InputStatistics:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.05 + torch.eye(COLUMNS)
    inputs = torch.randn(2048, COLUMNS, generator=generator) @ mixed * torch.logspace(-1, 0.5, COLUMNS)
    return InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))


def _weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) * 0.05


def _loss(weight: torch.Tensor, quantized: Quantized, statistics: InputStatistics) -> float:
    errors = weight - get_format(quantized.format).dequantize(quantized)
    return float(((errors @ statistics.second_moments) * errors).sum())


@pytest.mark.parametrize("name", NAMES)
def test_ggml_decodes_the_codes_and_signs_that_were_written(name: str) -> None:
    lattice, random = LATTICES[name], np.random.default_rng(0)
    weight, importance = _weight(), _statistics().importance
    blocks = get_format(name).quantize_with(weight, importance).data.numpy().reshape(ROWS * 2, -1)
    codes = random.integers(0, len(lattice.grid), (len(blocks), 256 // lattice.width), dtype=np.uint16)
    signs = random.integers(0, 256, (len(blocks), 32), dtype=np.uint8)
    if lattice.even:
        bits = np.unpackbits(signs[..., None], axis=-1)
        signs ^= (bits.sum(-1) % 2).astype(np.uint8) << 7
    scales = run_scales(name, blocks)
    expected = lattices._values(lattice.grid, codes, signs, scales)
    found = _decoded_by_ggml(name, np.ascontiguousarray(with_codes(name, blocks, codes, signs)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "name", [n if n == "iq3_xxs" else pytest.param(n, marks=pytest.mark.slow) for n in LATTICES]
)
def test_error_feedback_loses_less_than_importance_alone(name: str) -> None:
    weight, statistics, fmt = _weight(), _statistics(), get_format(name)
    plain = get_quantizer("imatrix").quantize(weight, fmt, "w", statistics)
    ours = get_quantizer("gptq").quantize(weight, fmt, "w", statistics)
    assert _loss(weight, ours, statistics) < 0.8 * _loss(weight, plain, statistics)
    found = _decoded_by_ggml(name, np.ascontiguousarray(ours.data.numpy().reshape(ROWS * 2, -1)))
    np.testing.assert_allclose(found.reshape(ROWS, COLUMNS), fmt.dequantize(ours).numpy(), rtol=1e-6)
