"""Imports run in no circles, and point downwards in the table of rooms of docs/architecture.md (in a row: rightwards).

Every import counts: inside functions, for type checkers alone, and modules that are named in a string for
`import_module`.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.docs.markdown import ROOT

PAGE = ROOT / "docs/architecture.md"
PACKAGE = ROOT / "src/kl_lens"
ARROWS = 60  # between rooms, of the 91 that could point downwards; lower it when one goes
_MODULE = re.compile(r"kl_lens\.[\w.]+(:\w+)?")


@cache
def rooms() -> tuple[str, ...]:
    """The rooms from top to bottom: packages and modules directly under kl_lens."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## The rooms\n")
    rows = re.findall(r"^\| (`[^|]+) \|", table.partition("\n## ")[0], re.MULTILINE)
    return tuple(name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row))


@cache
def modules() -> dict[str, str]:
    """The source of every module by its name; a package's is its `__init__.py`."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def room_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def imports(source: str, sources: Mapping[str, object]) -> Iterator[str]:
    """The modules of kl_lens that a module names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            if (node.module or "").split(".")[0] == "kl_lens":
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    yield name if name in sources else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.split(".")[0] == "kl_lens"
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0].removesuffix(".")
            if _MODULE.fullmatch(node.value) and name in sources:
                yield name


def upward(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports, a line for each."""
    order = rooms()
    room = room_of(module)
    named = dict.fromkeys(imports(source, modules()))
    return [
        f"{module} imports {name}, which stands above it"
        for name in named
        if order.index(room_of(name)) < order.index(room)
    ]


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other, in order; empty where there are none.

    A package's own name in a module of it is its folder (`resources.files`), or what comes before a module's name.
    """
    graph = {
        module: {
            name
            for name in imports(source, sources)
            if not f"{module}.".startswith(f"{name}.")
        }
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_every_room_has_one_place_in_the_table() -> None:
    order = rooms()
    seen = {room_of(module) for module in modules()}
    assert len(order) == len(set(order))
    assert not seen - set(order), "docs/architecture.md has no row for these"
    assert not set(order) - seen, "docs/architecture.md has rows for what is not there"


def test_imports_point_downwards() -> None:
    wrong = [line for name, source in modules().items() for line in upward(name, source)]
    assert not wrong, "\n".join(wrong)


def arrows(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second; `kl_lens/__init__.py` is no room."""
    return {
        (room_of(module), room_of(name))
        for module, source in sources.items()
        for name in imports(source, sources)
        if room_of(module) != room_of(name)
        and "__init__" not in map(room_of, (module, name))
    }


def test_rooms_know_few_others() -> None:
    pairs = arrows(modules())
    of_screens = {room for source, room in pairs if source == "cli"}
    assert of_screens == {"study", "reporting", "run", "base"}
    assert len(pairs) <= ARROWS, sorted(pairs)


def test_there_are_no_import_cycles() -> None:
    assert not (cycle := circle(modules())), " imports ".join(cycle)
