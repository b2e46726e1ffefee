"""docs/families.json is what scripts/models.py finds; README.md and docs/models.md say what it says."""

import importlib.util
import json
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
