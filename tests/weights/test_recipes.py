"""A recipe has one spelling, and it parses back."""

from __future__ import annotations

import json
import pickle

import pytest

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats import known_formats
from kl_lens.weights.quantizers import known_quantizers
from kl_lens.weights.recipes import Recipe


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
