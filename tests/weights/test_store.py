"""One place gives weights, and it gives the same ones every time."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kl_lens.base.errors import FormatError, UnlearntError
from kl_lens.weights.formats import Format, Quantized, get_format, known_formats
from kl_lens.weights.quantizers import (
    InputStatistics,
    Quantizer,
    known_quantizers,
    quantizer as quantizers,
)
from kl_lens.weights.recipes import Recipe
from kl_lens.weights.store import WeightStore, state_of
from tests.families import normal

NAME = "layers.0.in_proj"
INT8 = Recipe("int8")
Q4_K = Recipe("q4_k")
DOUBLED = Recipe("int8", "doubling")


class GivenWeights:
    """Matrices by name as a `WeightSource`."""

    device = torch.device("cpu")

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def weight(self, component: str) -> Tensor:
        return self._weights[component]

    def state(self, component: str) -> Hashable:
        return state_of(self._weights[component])


def _store(weight: Tensor, *arguments: Any, **options: Any) -> WeightStore:
    return WeightStore(GivenWeights({NAME: weight}), *arguments, **options)


@pytest.fixture
def weight() -> Tensor:
    return normal(24, 256)


@pytest.mark.parametrize("name", ["int4", "int4-g64", "int8", "fp16", "q8_0", "q4_k"])
def test_rounding_to_nearest_is_the_formats_own(name: str, weight: Tensor) -> None:
    store = _store(weight)
    fmt = get_format(name)
    assert torch.equal(store.values(NAME, Recipe(name)), fmt.roundtrip(weight))
    before = store.digest(NAME, Recipe(name))
    assert before == fmt.quantize(weight).digest
    weight[0, 0] += 1  # a weight that was changed is quantized anew
    assert store.digest(NAME, Recipe(name)) == fmt.quantize(weight).digest != before


def test_a_large_matrix_in_pieces_is_the_same(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {
        recipe: _store(weight).digest(NAME, recipe)
        for recipe in map(Recipe, ("int4-g64", "q4_k", "fp16"))
    }
    monkeypatch.setattr("kl_lens.weights.store._ROWS_AT_ONCE", 5 * 256)
    pieces = _store(weight)
    assert {recipe: pieces.digest(NAME, recipe) for recipe in whole} == whole


def test_what_is_expensive_is_kept_on_disk(
    weight: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = _store(weight, folder=tmp_path).digest(NAME, Q4_K)
    assert len(list(tmp_path.iterdir())) == 1
    again = _store(weight, folder=tmp_path)
    monkeypatch.setattr(
        get_format("q4_k").__class__, "_quantize", None
    )  # calling it again would fail
    assert again.digest(NAME, Q4_K) == digest
    again.quantized(NAME, INT8)  # cheap: not kept
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_damaged_or_deleted_is_made_again(weight: Tensor, tmp_path: Path) -> None:
    def digest() -> str:
        return _store(weight, folder=tmp_path).digest(NAME, Q4_K)

    original = digest()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert digest() == original
    assert path.read_bytes() != bytes(content)
    path.write_bytes(b"no safetensors")
    assert digest() == original
    path.unlink()
    assert digest() == original
    assert not list(tmp_path.glob(".*"))


def test_the_budget_is_kept(
    weight: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"w{i}": weight + i for i in range(6)}
    size = get_format("q4_k").bytes((24, 256))
    store = WeightStore(
        GivenWeights(weights), folder=tmp_path, disk_budget=3 * size + 3 * 300
    )
    for name in weights:
        store.quantized(name, Q4_K)
    assert 1 <= len(list(tmp_path.iterdir())) <= 3
    monkeypatch.setattr(
        get_format("q4_k").__class__, "_quantize", None
    )  # calling it again would fail
    fresh = WeightStore(GivenWeights(weights), folder=tmp_path)
    assert fresh.digest("w5", Q4_K) == store.digest("w5", Q4_K)  # the newest stays


def test_what_was_used_last_stays_in_memory(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"w{i}": weight + i for i in range(3)}
    store = WeightStore(GivenWeights(weights))
    size = get_format("int8").bytes((24, 256))
    monkeypatch.setattr("kl_lens.weights.store.MEMORY_BUDGET", 2 * size)
    first, second = (store.quantized(name, INT8) for name in ("w0", "w1"))
    assert store.quantized("w0", INT8) is first  # and now w1 is the oldest
    third = store.quantized("w2", INT8)
    assert store.quantized("w0", INT8) is first
    assert store.quantized("w2", INT8) is third
    assert store.quantized("w1", INT8) is not second


@pytest.mark.parametrize("factors", [3.0, torch.arange(24.0)[:, None] + 1])
def test_factors_are_multiplied_with_the_rows(
    weight: Tensor, factors: float | Tensor, tmp_path: Path
) -> None:
    """Before rounding; those of a tuned weight go into its scales, and its codes stay."""
    store = _store(weight, folder=tmp_path / "cache")
    fmt = get_format("int8")
    scaled = store.quantized(NAME, INT8, factors)
    assert scaled.digest == fmt.quantize(weight * factors).digest
    tuned = Recipe("int8", "tuned-1234")
    assert not store.has_tuned(NAME, tuned)
    with pytest.raises(FormatError, match="is not in this run; tune the plan"):
        store.quantized(NAME, tuned)
    store.keep_tuned(NAME, tuned, fmt.quantize(weight))
    assert store.has_tuned(NAME, tuned)
    assert store.digest(NAME, tuned) == fmt.quantize(weight).digest
    codes, scales = store.quantized(NAME, tuned, factors).tensors.values()
    assert torch.equal(codes, fmt.quantize(weight).data)
    plain = fmt.quantize(weight).scales
    assert plain is not None
    assert torch.equal(scales, (plain.float() * factors).half())


class Doubling(Quantizer):
    """Learns: rounds twice the weight when the first column matters."""

    name = "doubling"
    learns = True
    calls = 0

    def suits(self, fmt: Format) -> str | None:
        return "doubling is for int8" if fmt.name != "int8" else None

    def quantize(
        self,
        weight: Tensor,
        fmt: Format,
        name: str,
        statistics: InputStatistics | None,
    ) -> Quantized:
        assert statistics is not None
        type(self).calls += 1
        return fmt.quantize(
            weight * (2 if statistics.second_moments[0, 0] > 0 else 1), name
        )


class Known:
    def __init__(self, digest: str, first: float) -> None:
        self.digest = digest
        self._first = first

    def of(self, component: str, device: torch.device | str = "cpu") -> InputStatistics:
        moments = torch.eye(256)
        moments[0, 0] = self._first
        return InputStatistics(moments, (10,))


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> type[Doubling]:
    monkeypatch.setitem(quantizers.QUANTIZERS, "doubling", Doubling())
    monkeypatch.setattr(Doubling, "calls", 0)
    return Doubling


def test_what_was_learnt_is_bound_to_its_statistics(
    weight: Tensor, tmp_path: Path, doubling: type[Doubling]
) -> None:
    store = _store(weight, folder=tmp_path)
    with pytest.raises(FormatError, match="needs statistics and this model has none"):
        store.quantized(NAME, DOUBLED)
    store.learn_from(Known("aa", 1.0))
    twice = store.digest(NAME, DOUBLED)
    assert twice == get_format("int8").quantize(weight * 2).digest
    store.learn_from(
        Known("bb", 0.0)
    )  # other statistics: other weights, and both are kept
    assert store.digest(NAME, DOUBLED) == store.digest(NAME, INT8)
    assert doubling.calls == 2
    store.learn_from(Known("aa", 1.0))
    assert store.digest(NAME, DOUBLED) == twice
    assert doubling.calls == 2  # from memory or disk
    fresh = _store(weight, Known("aa", 1.0), tmp_path)
    assert fresh.digest(NAME, DOUBLED) == twice
    assert doubling.calls == 2


def test_the_store_says_what_recipes_are_made_from(
    weight: Tensor, doubling: type[Doubling]
) -> None:
    store = _store(weight)
    plain = [INT8, Q4_K]
    assert (
        store.learnt_by(plain, expected="aa") is None
    )  # nothing learns: nothing to check
    with pytest.raises(UnlearntError, match="kl-lens calibrate MODEL --run DIR"):
        store.learnt_by([INT8, DOUBLED])
    store.learn_from(Known("bb", 0.0))
    assert store.learnt_by([INT8, DOUBLED]) == "bb"
    assert store.learnt_by([DOUBLED], expected="bb") == "bb"
    with pytest.raises(
        FormatError,
        match="made with statistics aa, but the run has bb; make the plan again",
    ):
        store.learnt_by([DOUBLED], expected="aa")


def test_what_is_kept_serves_the_same_numbers_in_another_type(
    weight: Tensor, tmp_path: Path, doubling: type[Doubling]
) -> None:
    """A streamed checkpoint is in half precision where the opened model is in single."""
    half = weight.half()
    for version, calls in ((half, 1), (half.float(), 1), (weight, 2)):
        _store(version, Known("aa", 1.0), tmp_path).digest(NAME, DOUBLED)
        assert doubling.calls == calls


def test_the_error_of_a_components_own_outputs(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = normal(50, 256, seed=1)

    class Seen:
        digest = "seen"

        def of(
            self, component: str, device: torch.device | str = "cpu"
        ) -> InputStatistics:
            return InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))

    stacked = torch.stack([weight, 2 * weight])
    store = WeightStore(GivenWeights({NAME: weight, "experts": stacked}), Seen())
    for name, matrix in ((NAME, weight), ("experts", stacked)):
        moved = (matrix - get_format("int4-g64").roundtrip(matrix)) @ inputs.T
        expected = float(moved.square().sum() / len(inputs))
        assert store.output_error(name, Recipe("int4-g64")) == pytest.approx(
            expected, rel=1e-4
        )
        estimate = store.output_error(
            name, Recipe("int4-g64"), rows=matrix.shape[-2] // 2
        )
        assert estimate == pytest.approx(expected, rel=0.2)  # from every second row
        assert estimate != expected
    monkeypatch.setattr("kl_lens.weights.store._ROWS_AT_ONCE", 5 * 256)
    assert store.output_error("experts", Recipe("int4-g64")) == pytest.approx(
        expected, rel=1e-4
    )
    with pytest.raises(UnlearntError, match="needs statistics and this model has none"):
        _store(weight).output_error(NAME, Recipe("int4-g64"))


# -- a recipe has one spelling, and it parses back ----------------------------------------------------------------


def test_every_recipe_parses_back() -> None:
    for fmt in known_formats():
        for method in known_quantizers():
            try:
                recipe = Recipe.parse(f"{fmt}+{method}")
            except FormatError:  # a method that has no meaning for the format
                continue
            assert recipe == Recipe(fmt, method) == Recipe.parse(str(recipe))
            assert (recipe.grid.name, recipe.method, recipe.quantizer.name) == (
                fmt,
                method,
                method,
            )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown format 'int5'; known: fp16"),
        ("int4+magic", "unknown method 'magic'; known: rtn"),
        ("int4@0123", "unknown format 'int4@0123'"),
        ("int4+", "names no method after the \\+"),
        ("", "unknown format ''"),
    ],
)
def test_nonsense_is_refused_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Recipe.parse(text)
