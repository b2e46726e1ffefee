"""A recipe has one spelling, and it parses back."""

from __future__ import annotations

import json
import pickle

import pytest

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import get_format, known_formats
from kl_lens.weights.quantizers import known_quantizers
from kl_lens.weights.recipes import Recipe, fitting_recipe


@pytest.mark.parametrize("name", [n for n in known_formats() if not get_format(n).needs_importance])
def test_a_format_alone_means_rounding_to_nearest(name: str) -> None:
    recipe = Recipe.parse(name)
    assert (recipe.grid.name, recipe.method) == (name, "rtn")
    assert recipe == name
    assert Recipe.parse(f" {name.upper()}+RTN") == name


def test_every_recipe_parses_back() -> None:
    for fmt in known_formats():
        for method in known_quantizers():
            try:
                recipe = Recipe.parse(f"{fmt}+{method}")
            except FormatError:  # a method that has no meaning for the format
                continue
            assert recipe == Recipe(fmt, method) == Recipe.parse(str(recipe))
            assert (recipe.grid.name, recipe.method, recipe.quantizer.name) == (fmt, method, method)


def test_a_recipe_is_the_text_that_files_hold_and_comes_back_from_another_process_as_a_recipe() -> None:
    recipe = Recipe("int4-g64", "gptq")
    assert json.dumps({"head": recipe}) == '{"head": "int4-g64+gptq"}'
    assert {recipe: 1}["int4-g64+gptq"] == 1
    back = pickle.loads(pickle.dumps(recipe))
    assert (type(back), back, back.method) == (Recipe, recipe, "gptq")


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


def test_what_does_not_fit_is_resolved_as_its_format_is() -> None:
    assert fitting_recipe(Recipe("int4-g128"), (8, 192)) == (
        Recipe("int4-g64"),
        "int4-g128: 192 columns do not divide into blocks of 128; stored as int4-g64",
    )
    assert fitting_recipe(Recipe("int4-g128"), (8, 256)) == (Recipe("int4-g128"), None)
