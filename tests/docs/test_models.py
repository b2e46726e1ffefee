"""docs/models.md is what scripts/models.py finds, and nothing in it is wrong without a word."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.docs.markdown import ROOT


def _script():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts/models.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _rows(text: str) -> dict[str, list[str]]:
    """Model → its cells: whether there is a number, which differs from machine to machine in its last digit."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[cells[0].strip(" `")] = [
                cells[1],
                cells[2],
                *("–" if c == "–" else "yes" for c in cells[3:7]),
            ]
    return found


PAGE = (ROOT / "docs/models.md").read_text("utf-8") if (ROOT / "docs/models.md").exists() else ""


def test_no_row_is_wrong() -> None:
    assert _rows(PAGE), "docs/models.md has rows"
    assert "**" not in PAGE


def test_every_recurrent_class_of_transformers_has_a_row() -> None:
    assert {"hymba", *_script().recurrent_families()} <= set(_rows(PAGE))


@pytest.mark.slow
def test_the_page_is_what_the_script_finds() -> None:
    found = "\n".join(str(row) for row in _script().rows())
    assert "**" not in found
    assert _rows(found) == _rows(PAGE)
