"""docs/families.json is what scripts/models.py finds; README.md and docs/models.md say what it says."""

import importlib.util
import json
import re
import sys
from dataclasses import asdict
from typing import Any

import pytest

from kl_lens.targets.gguf.architectures import ARCHITECTURES
from tests.docs.markdown import ROOT

ROWS: dict[str, dict[str, Any]] = {
    row["family"]: row
    for row in json.loads((ROOT / "docs/families.json").read_text("utf-8"))["families"]
}


def _script(name: str):
    spec = importlib.util.spec_from_file_location(
        f"script_{name}", ROOT / f"scripts/{name}.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_pages_say_what_the_data_says() -> None:
    _script("families").main(["--check"])


def test_no_row_is_wrong() -> None:
    assert ROWS
    assert "**" not in json.dumps(list(ROWS.values()))


def test_every_recurrent_class_of_transformers_has_a_row() -> None:
    assert {"hymba", *_script("models").recurrent_families()} <= set(ROWS)


def test_every_gguf_architecture_has_a_row_that_says_yes() -> None:
    assert set(ARCHITECTURES) == {name for name, row in ROWS.items() if row["gguf"]} - {
        "mamba2_groups"
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ROWS)
def test_a_row_is_what_the_script_finds(family: str) -> None:
    """Numbers differ from machine to machine in their last digit: whether there is one may not."""

    def answers(row: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            name: bool(row[name])
            for name in ("engines", "float64", "openvino", "gguf", "mlx")
        }
        return {
            **numbers,
            "kind": row["kind"],
            "blocks": row["blocks"],
            "why": sorted(row["why"]),
        }

    row = asdict(_script("models").tried(family))
    assert "**" not in json.dumps(row)
    assert answers(row) == answers(ROWS[family])


# Of docs/families.md: what the files of each command were checked with, and the command.
_COMMANDS = re.compile(
    r"tiny models of ([\w, ]+) -->\n```console\nkl-lens run org/model (.+)\n```"
)
BY_FAMILY = [
    (family, words.split())
    for families, words in _COMMANDS.findall(
        (ROOT / "docs/families.md").read_text(encoding="utf-8")
    )
    for family in re.split(", | and ", families)
]


def targets_of(words: list[str]) -> list[str]:
    index = next(i for i, word in enumerate(words) if word.startswith("--target"))
    return words[index + 1].split(",")


@pytest.mark.parametrize(("family", "words"), BY_FAMILY)
def test_the_page_by_family_promises_only_files_that_can_be_written(
    family: str, words: list[str]
) -> None:
    assert all(ROWS[family][target] for target in targets_of(words))


def test_every_family_that_people_ask_for_has_its_command() -> None:
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert page.count("```console") == page.count("\n## ") == 5
    assert len(BY_FAMILY) == 9
