"""torch, and the names of packages, imported on first use.

Running an exported model needs only numpy and the runtime; everything else needs torch and transformers, which take
seconds and hundreds of megabytes on a small device.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

# Of files that may be a model: suffix → "module:function", which makes a folder of one (`model.files.Foreign`).
OPENERS: dict[str, str] = {}


class _Module:
    """A module that is imported when a name in it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = _Module("torch")
    Tensor = Any  # for annotations


def lazy_modules(package: str, *names: str) -> Iterator[Any]:
    """Modules of a package, each imported when a name in it is first asked for."""
    return (_Module(f"{package}.{name}") for name in names)


def lazy_names(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """A package's `__getattr__` and `__all__`, read from its own source, so that each name is listed once.

    The package exports what it imports as `from MODULE import NAME as NAME`; under `if TYPE_CHECKING` that is imported
    on first use. A name must not equal the submodule it comes from: Python would replace it by the submodule.
    """
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[package])))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name
    }

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return find, sorted(homes)
