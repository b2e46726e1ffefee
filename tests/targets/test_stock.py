"""Mixtures that everybody knows, and what the targets say about themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kl_lens.checkpoints import LoadedModel
from kl_lens.formats import get_format
from kl_lens.recipes import Recipe
from kl_lens.records import Plan
from kl_lens.targets import TARGETS, describe_target, export, target_of
from tests.families import tiny_model


@pytest.fixture(scope="module")
def mamba() -> LoadedModel:
    return LoadedModel("mamba", Path(), tiny_model("mamba"), None)


@pytest.fixture(scope="module")
def jamba() -> LoadedModel:
    return LoadedModel("jamba", Path(), tiny_model("jamba"), None)


def recipes(target: str, model: LoadedModel) -> dict[str, dict[str, str]]:
    found = describe_target(target).stock_recipes(model)
    assert all(stock.origin for stock in found)
    return {stock.name: dict(stock.assignment) for stock in found}


@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe_is_one_that_the_target_holds(
    target: str, mamba: LoadedModel, jamba: LoadedModel
) -> None:
    for model in (mamba, jamba):
        shapes = {c.name: c.shape for c in model.anatomy.candidates}
        for assignment in recipes(target, model).values():
            assert set(assignment) == set(shapes)
            for name, recipe in assignment.items():
                assert describe_target(target).holds(Recipe.parse(recipe).grid, shapes[name]) is None


def test_llama_cpp_treats_state_space_matrices_alike(mamba: LoadedModel) -> None:
    found = recipes("gguf", mamba)
    assert list(found) == ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    # 64 and 128 columns hold no K-quant: what llama.cpp puts there instead. 5 columns of dt_proj hold no block.
    assert Counter(found["Q4_K_M"].values()) == {"q5_0": 12, "q8_0": 1, "fp16": 4}
    assert Counter(found["Q4_0"].values()) == {"q4_0": 12, "q8_0": 1, "fp16": 4}
    assert found["Q4_K_M"][mamba.anatomy.head] == "q8_0"  # in place of q6_k


def test_llama_cpp_raises_some_values_and_feed_forwards(jamba: LoadedModel) -> None:
    plain, mixed = recipes("gguf", jamba)["Q6_K"], recipes("gguf", jamba)["Q4_K_M"]
    raised = {name for name, recipe in mixed.items() if recipe == plain[name] == "q8_0"}
    kinds = {name.rpartition(".")[2] for name in raised - {jamba.anatomy.head}}
    assert kinds <= {"v_proj", "down_proj"}
    assert "down_proj" in kinds


def test_nncf_keeps_the_outer_layers_in_eight_bits(jamba: LoadedModel) -> None:
    found = recipes("openvino", jamba)
    assert set(found["INT8_SYM"].values()) == {"int8"}
    grouped = found["INT4_SYM-g64"]
    outer = {jamba.anatomy.embedding, jamba.anatomy.head}
    assert {grouped[name] for name in outer} == {"int8"}
    columns = {c.name: c.shape[-1] for c in jamba.anatomy.candidates}
    inner = {name: recipe for name, recipe in grouped.items() if name not in outer}
    for name, recipe in inner.items():
        size = 64 if columns[name] % 64 == 0 else 32
        assert recipe == (f"int4-g{size}" if columns[name] % size == 0 else "int8")


@pytest.mark.parametrize("target", TARGETS)
def test_menus_are_formats_that_the_target_holds(target: str) -> None:
    for name in describe_target(target).menu:
        assert describe_target(target).holds(get_format(name), (256, 256)) is None
    assert describe_target(target).unsupported("mamba") is None
    assert "bert" in (describe_target(target).unsupported("bert") or "")


@pytest.mark.parametrize(
    ("target", "recipe"), [("openvino", "int4-g32"), ("openvino", "uint4-g64"), ("gguf", "q8_0")]
)
def test_digests_are_those_of_the_bytes_in_the_file(
    target: str, recipe: str, mamba: LoadedModel, tmp_path: Path
) -> None:
    pytest.importorskip(target, reason=f"needs the extra {target}")
    name = "backbone.layers.0.mixer.in_proj"
    for plan in ({}, {name: recipe}):
        export(mamba, Plan("p", plan, "test"), target, tmp_path / str(len(plan)))
    before, after = (target_of(tmp_path / n).shipped_digests(tmp_path / n) for n in ("0", "1"))
    changed = {tensor for tensor in before if before[tensor] != after[tensor]}
    tensors = target_of(tmp_path / "1").record(tmp_path / "1").tensors
    assert changed == {t.runtime_name for t in tensors if t.component == name}
    assert {t.runtime_name: t.digest for t in tensors} == {
        t.runtime_name: after[t.runtime_name] for t in tensors
    }
