"""Methods that learn from text: values on the grid, never worse than rounding, and defined for bad input."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import Quantized, get_format
from kl_lens.weights.formats.blocks import LAYOUTS
from kl_lens.weights.formats.gguf_blocks import ggml_library
from kl_lens.weights.quantizers import (
    InputStatistics,
    lattice_rounding as lattices,
)
from kl_lens.weights.quantizers.block_scales import searched_blocks
from kl_lens.weights.quantizers.feedback import (
    Objective,
    descended,
    fed_back,
    with_fitted_scales,
)
from kl_lens.weights.quantizers.group_scales import (
    searched_levels,
    try_scales,
    try_scales_on_cpu,
)
from kl_lens.weights.quantizers.lattice_rounding import (
    EVEN,
    grid_of,
    run_scales,
    with_codes as with_lattice_codes,
)
from kl_lens.weights.quantizers.levels import Levels
from kl_lens.weights.recipes import Recipe
from tests.families import normal, slow

TOKENS = 10**6  # that moments rest on: enough
GROUPED = [
    "int4",
    "int4-g32",
    "int8",
    "uint4-g64",
    "uint2-g64",
    "nf4-g32",
    "mxfp4",
    "q2_0",
    "affine3-g32",
]
METHODS = [
    "int4+search",
    "int4-g32+gptq",
    "uint4-g32+gptq",
    "affine4-g32+gptq",
    "q4_k+imatrix",
    "q4_k+gptq",
]
RECIPES = [
    *(f"{name}+{method}" for name in GROUPED for method in ("search", "gptq")),
    *(f"{name}+imatrix" for name in LAYOUTS if name != "q8_0"),
    *(f"{name}+gptq" for name in LAYOUTS),
]


def _weight(rows: int = 24, columns: int = 256, seed: int = 0) -> Tensor:
    return normal(rows, columns, seed=seed) * 0.05


def _moments(columns: int = 256, tokens: int = 600, seed: int = 1) -> Tensor:
    """Inputs that go together, some of them far larger than others, as in a real model."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mixed = random(tokens, columns) @ random(columns, columns)
    inputs = (mixed / columns**0.5 + random(tokens, columns)) * torch.exp(random(columns))
    return inputs.T @ inputs / tokens


def _stored(
    recipe: str, weight: Tensor, moments: Tensor | None, *tokens: int
) -> Quantized:
    parsed = Recipe.parse(recipe)
    learnt = None if moments is None else InputStatistics(moments, tokens or (TOKENS,))
    return parsed.quantizer.quantize(weight, parsed.grid, "layer", learnt)


def _quantized(recipe: str, weight: Tensor, moments: Tensor, *tokens: int) -> Tensor:
    return Recipe.parse(recipe).grid.dequantize(_stored(recipe, weight, moments, *tokens))


def _loss(weight: Tensor, values: Tensor, moments: Tensor) -> Tensor:
    errors = (weight - values).double()
    return ((errors @ moments.double()) * errors).sum(-1)


@pytest.mark.parametrize(
    "recipe",
    [
        *METHODS,
        *(slow(r) for r in RECIPES if r not in METHODS),
    ],
)
def test_no_row_is_worse_than_rounded_to_nearest_and_the_whole_is_better(
    recipe: str,
) -> None:
    weight = _weight()
    moments = _moments()
    grid = Recipe.parse(recipe).grid
    stored = _stored(recipe, weight, moments)
    if recipe in METHODS:
        assert stored.digest == _stored(recipe, weight, moments).digest
    plain = _loss(weight, grid.roundtrip(weight), moments)
    reached = _loss(weight, grid.dequantize(stored), moments)
    # ggml's own search weighs columns, and promises nothing for a row.
    if not recipe.endswith("+imatrix"):
        assert (reached <= plain * (1 + 1e-5)).all()
    assert reached.sum() < (0.85 if recipe.endswith("gptq") else 1) * plain.sum()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_search_for_gpus_loses_no_more_than_ggml_s(name: str) -> None:
    """Weighed by importance, to two per cent on ordinary rows; on awkward ones nothing worse happens than to ggml."""
    fmt = get_format(name)
    importance = _moments(512).diagonal().clone()
    importance[5:9] = 0
    weight = _weight(200, 512)
    weight[3] = weight[3].abs()
    weight[0] = 0
    weight[1] = 0.3
    weight[2] = -0.3
    weight[4, 1::2] = weight[4, 0]
    weight[5, 77] = 1000.0
    weight[6] = weight[6] * 1e-6

    def losses(values: Tensor) -> Tensor:
        return (importance * (weight - values).double().square()).sum(-1)

    searched = losses(fmt.dequantize(searched_blocks(fmt, weight, importance)))  # type: ignore[arg-type]
    ggml = losses(fmt.dequantize(fmt.quantize_with(weight, importance)))  # type: ignore[attr-defined]
    assert searched[7:].sum() < 1.02 * ggml[7:].sum()
    assert (searched <= 2 * ggml + 1e-6 * losses(torch.zeros_like(weight))).all()


def _gptq_as_published(weight: Tensor, levels: Levels, moments: Tensor) -> Tensor:
    """Frantar et al. 2022, algorithm 1: with the inverse and its Cholesky factor, a column at a time."""
    factor = torch.linalg.cholesky(torch.linalg.inv(moments.double()), upper=True)
    remainder = weight.double().clone()
    codes = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        codes[:, column] = levels.rounded(remainder.float())[:, column]
        error = (remainder[:, column] - levels.values(codes)[:, column]) / factor[
            column, column
        ]
        remainder[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    return codes


@pytest.mark.parametrize("name", ["int4", "uint4-g32", "nf4-g32"])
def test_without_reordering_it_is_gptq_as_published(name: str) -> None:
    weight = _weight()
    moments = _moments()
    moments = moments + 0.05 * moments.diagonal().mean() * torch.eye(256)
    objective = Objective.of(moments, 0.0)
    natural = torch.arange(256)
    turned = torch.linalg.cholesky(moments.double().flip(0, 1)).flip(0, 1)
    mixing = (turned / turned.diagonal()).float().contiguous()
    unordered = Objective(moments, natural, mixing, moments.diagonal())
    levels = searched_levels(weight, get_format(name), moments.diagonal())
    equal = fed_back(weight, levels, unordered) == _gptq_as_published(
        weight, levels, moments
    )
    assert equal.float().mean() > 0.999  # a tie may fall to the other side
    assert not torch.equal(objective.order, natural)
    codes = levels.rounded(weight)
    before = _loss(weight, levels.values(codes), objective.moments)
    for _ in range(3):  # each round of refinement can only help
        levels = with_fitted_scales(weight, levels, codes, objective)
        fitted = _loss(weight, levels.values(codes), objective.moments)
        codes = descended(weight, levels, codes, objective)
        after = _loss(weight, levels.values(codes), objective.moments)
        assert (fitted <= before * (1 + 1e-5)).all()
        assert (after <= fitted * (1 + 1e-5)).all()
        before = after


@pytest.mark.parametrize(
    ("lowest", "highest", "table"),
    [(-8, 7, None), (0, 15, None), (0, 3, (-1.0, -0.2, 0.3, 1.0))],
)
def test_the_search_on_the_cpu_equals_its_plain_form(
    lowest: int, highest: int, table: tuple[float, ...] | None
) -> None:
    groups = _weight(40, 32)
    weigh = _moments(64).diagonal().reshape(2, 32)
    plain = Levels(
        32, groups.abs().amax(-1, keepdim=True) / highest, lowest, highest, table=table
    )
    if lowest == 0 and table is None:
        plain = replace(plain, zero_points=torch.full((40, 1), 7.0))
    factors = torch.tensor([0.6, 0.8, 1.0, 0.9])
    shifts = torch.tensor([0.0, 1.0, -1.0, 0.0])
    fast, slow = (
        trial(groups, weigh, plain, factors, shifts)
        for trial in (try_scales_on_cpu, try_scales)
    )
    torch.testing.assert_close(fast[0], slow[0])
    assert slow[1] is None or torch.equal(fast[1], slow[1])


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", METHODS)
def test_odd_moments_and_weights_give_a_bounded_result(recipe: str) -> None:
    weight = _weight()
    parsed = Recipe.parse(recipe)
    few = _quantized(recipe, weight, _moments(tokens=5))  # singular
    assert (weight - few).abs().max() < 0.2
    moments = _moments()
    moments[7] = 0
    moments[:, 7] = 0  # a column that was never active
    assert (weight - _quantized(recipe, weight, moments))[:, 7].abs().max() < 0.1
    nothing = _quantized(recipe, weight, torch.zeros(256, 256))
    assert torch.isfinite(nothing).all()
    if parsed.method != "imatrix":
        assert torch.equal(nothing, parsed.grid.roundtrip(weight))
    weight[:3] = torch.tensor([0.0, 0.25, -3.0])[:, None]
    constant = _quantized(recipe, weight, _moments())[:3].mean(1)
    # 4-bit levels on one side only reach so far: rounding to nearest is 1/8 off at worst.
    torch.testing.assert_close(
        constant, torch.tensor([0.0, 0.25, -3.0]), rtol=0.13, atol=1e-6
    )


@pytest.mark.parametrize("recipe", METHODS)
def test_statistics_that_do_not_belong_are_named(recipe: str) -> None:
    broken = _moments()
    broken[0, 0] = torch.nan
    endless = _weight()
    endless[0, 0] = torch.inf
    for weight, moments, message in (
        (_weight(), _moments(64), r"its statistics have shape \(64, 64\)"),
        (_weight(), broken, "its statistics hold NaN"),
        (_weight(), None, ".* needs calibration statistics"),
        (endless, _moments(), "has NaN or infinity"),
    ):
        with pytest.raises(FormatError, match=f"layer: {message}"):
            _stored(recipe, weight, moments)


@pytest.mark.parametrize("recipe", METHODS)
def test_experts_are_quantized_each_with_its_own_moments(recipe: str) -> None:
    weights = torch.stack([_weight(seed=1), _weight(seed=2)])
    moments = torch.stack([_moments(seed=3), _moments(seed=4)])
    together = _quantized(recipe, weights, moments, TOKENS, TOKENS)
    for expert in range(2):
        alone = _quantized(recipe, weights[expert], moments[expert])
        assert torch.equal(together[expert], alone)
    shared = _quantized(recipe, weights, moments[0])
    assert torch.equal(shared[1], _quantized(recipe, weights[1], moments[0]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**16),
    st.sampled_from(["int4+gptq", "uint4-g32+gptq", "q4_0+gptq"]),
    st.floats(-6, 4),
)
def test_results_are_on_the_grid_for_weights_of_any_size(
    seed: int, recipe: str, magnitude: float
) -> None:
    weight = _weight(4, 64, seed) * 10.0**magnitude
    weight[0, : seed % 64] = 0
    moments = _moments(64, 80, seed)
    values = _quantized(recipe, weight, moments, 80)
    assert torch.isfinite(values).all()
    plain = _loss(weight, Recipe.parse(recipe).grid.roundtrip(weight), moments)
    assert (_loss(weight, values, moments) <= plain * (1 + 1e-4) + 1e-30).all()


@pytest.mark.parametrize("recipe", ["int4+gptq", "q4_k+gptq"])
def test_what_rests_on_few_tokens_is_trusted_less(recipe: str) -> None:
    """Moments of 300 tokens fit those tokens; told how few they are, the method does better on the others."""
    weight = _weight()
    inputs = normal(20_000, 256, seed=6) @ normal(256, 256, seed=5) / 16
    inputs = inputs + 0.3 * normal(20_000, 256, seed=7)
    few, many = (part.T @ part / len(part) for part in (inputs[:300], inputs))
    trusting, doubting = (_quantized(recipe, weight, few, n) for n in (TOKENS, 300))
    losses = [
        [float(_loss(weight, values, moments).sum()) for moments in (few, many)]
        for values in (trusting, doubting)
    ]
    assert losses[1][1] < 0.97 * losses[0][1]
    assert losses[1][0] > losses[0][0]


LATTICES = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
# The first use of the others takes ggml seconds.
NAMES = [name if name == "iq3_xxs" else slow(name) for name in LATTICES]
ROWS = 4
COLUMNS = 512


def _decoded_by_ggml(name: str, blocks: np.ndarray) -> np.ndarray:
    blocks = np.ascontiguousarray(blocks)
    values = np.empty((len(blocks), 256), np.float32)
    decode = getattr(ggml_library(), f"dequantize_row_{name}")
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    decode.restype = None
    decode(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


@pytest.mark.parametrize("name", NAMES)
def test_ggml_decodes_the_codes_and_signs_that_were_written(name: str) -> None:
    grid = grid_of(name)
    random = np.random.default_rng(0)
    weight = _weight(ROWS, COLUMNS, 7)
    stored = get_format(name).quantize_with(weight, _moments(COLUMNS).diagonal())  # type: ignore[attr-defined]
    blocks = stored.data.numpy().reshape(ROWS * 2, -1)
    shape = (len(blocks), 256 // grid.shape[1])
    codes = random.integers(0, len(grid), shape, dtype=np.uint16)
    signs = random.integers(0, 256, (len(blocks), 32), dtype=np.uint8)
    if name in EVEN:
        bits = np.unpackbits(signs[..., None], axis=-1)
        signs ^= (bits.sum(-1) % 2).astype(np.uint8) << 7
    expected = lattices._values(grid, codes, signs, run_scales(name, blocks))
    decoded = _decoded_by_ggml(name, with_lattice_codes(name, blocks, codes, signs))
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LATTICES)
def test_error_feedback_loses_less_than_importance_alone(name: str) -> None:
    weight = _weight(ROWS, COLUMNS, 7)
    moments = _moments(COLUMNS, 2048)
    learnt, plain = (_stored(f"{name}+{m}", weight, moments) for m in ("gptq", "imatrix"))
    values = get_format(name).dequantize(learnt)
    known = _loss(weight, get_format(name).dequantize(plain), moments).sum()
    assert _loss(weight, values, moments).sum() < 0.8 * known
    decoded = _decoded_by_ggml(name, learnt.data.numpy().reshape(ROWS * 2, -1))
    np.testing.assert_allclose(decoded.reshape(ROWS, COLUMNS), values, rtol=1e-6)
