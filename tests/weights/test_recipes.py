"""A recipe has one spelling, and it parses back."""

from __future__ import annotations

import pytest

from kl_lens.errors import FormatError
from kl_lens.formats import get_format, known_formats
from kl_lens.quantizers import known_quantizers
from kl_lens.recipes import Recipe, fitting_recipe, spelled


@pytest.mark.parametrize("name", [n for n in known_formats() if not get_format(n).needs_importance])
def test_a_format_alone_means_rounding_to_nearest(name: str) -> None:
    recipe = Recipe.parse(name)
    assert (recipe.format, recipe.method, recipe.learnt) == (name, "rtn", None)
    assert str(recipe) == recipe.key == name
    assert spelled(f"{name.upper()}+RTN") == name


def test_every_recipe_parses_back() -> None:
    for fmt in known_formats():
        for method in known_quantizers():
            try:
                recipe = Recipe.parse(f"{fmt}+{method}")
            except FormatError:  # a method that has no meaning for the format
                continue
            assert Recipe.parse(str(recipe)) == recipe
            learnt = Recipe(recipe.format, recipe.method, "1a2b")
            assert Recipe.parse(learnt.key) == learnt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown format 'int5'; known: fp16"),
        ("int4+magic", "unknown method 'magic'; known: rtn"),
        ("int4+", "names no method behind the \\+"),
        ("", "unknown format ''"),
    ],
)
def test_nonsense_is_refused_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Recipe.parse(text)


def test_what_does_not_fit_is_resolved_as_its_format_is() -> None:
    assert fitting_recipe("int4-g128", (8, 192)) == (
        Recipe("int4-g64"),
        "int4-g128: 192 columns do not divide into blocks of 128; stored as int4-g64",
    )
    assert fitting_recipe("int4-g128", (8, 256)) == (Recipe("int4-g128"), None)
