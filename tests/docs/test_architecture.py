"""Imports point downwards in the table of rooms of docs/architecture.md, and within a row to the right.

Imports inside functions count: they are only later. So do modules that are named in a string for `import_module`, and
those that a lazy package gives away (`from MODULE import NAME as NAME`). What else stands under `if TYPE_CHECKING` is
never loaded and does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs/architecture.md"
PACKAGE = ROOT / "src/kl_lens"
_MODULE = re.compile(r"kl_lens\.[\w.]+(:\w+)?")


@cache
def rooms() -> tuple[str, ...]:
    """The rooms from top to bottom: packages and modules directly under kl_lens."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## The rooms\n")
    rows = re.findall(r"^\| (`[^|]+) \|", table.partition("\n## ")[0], re.MULTILINE)
    return tuple(name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row))


@cache
def modules() -> dict[str, Path]:
    """Every module by its name; a package by its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of kl_lens that a module loads, now or later."""
    for node in _loaded(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            if (node.module or "").split(".")[0] == "kl_lens":
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    yield name if name in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kl_lens")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0].removesuffix(".")
            if _MODULE.fullmatch(node.value) and name in known:
                yield name


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        yield from (child for child in node.body if _is_given_away(child))
        for child in node.orelse:
            yield from _loaded(child)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _loaded(child)


def _is_given_away(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == alias.asname for alias in node.names)


def upward(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports, a line for each."""
    order = rooms()
    here = room_of(module)
    found = dict.fromkeys(imports(ast.parse(source), modules()))
    return [
        f"{module} imports {name}, which stands above it"
        for name in found
        if order.index(room_of(name)) < order.index(here)
    ]


def test_every_room_has_one_place_in_the_table() -> None:
    order, there = rooms(), {room_of(module) for module in modules()}
    assert len(order) == len(set(order))
    assert not there - set(order), "docs/architecture.md has no row for these"
    assert not set(order) - there, "docs/architecture.md has rows for what is not there"


def test_imports_point_downwards() -> None:
    wrong = [
        line for name, path in modules().items() for line in upward(name, path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "from kl_lens.planning import refine",
        "from kl_lens import planning",
        "import kl_lens.planning.files",
        "def later():\n    from kl_lens.planning.files import read_plan",
        "if TYPE_CHECKING:\n    from kl_lens.planning import refine as refine",
        "import_module(f'kl_lens.planning.{name}')",
        "import kl_lens",
    ],
)
def test_an_import_that_runs_upwards_is_found(source: str) -> None:
    (wrong,) = upward("kl_lens.formats.integer", source)
    assert re.fullmatch(r"kl_lens\.formats\.integer imports kl_lens[\w.]*, which stands above it", wrong)


@pytest.mark.parametrize(
    "source",
    [
        "from kl_lens.errors import FormatError",
        "from kl_lens.formats.base import Format",
        "import torch",
        "'kl_lens.planning does this, and prose may say so'",
        "if TYPE_CHECKING:\n    from kl_lens.planning import refine",
    ],
)
def test_what_is_below_or_never_loaded_is_no_fault(source: str) -> None:
    assert upward("kl_lens.formats.integer", source) == []
