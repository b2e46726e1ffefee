"""Packages whose names load when they are first asked for.

Running an exported model needs numpy and the runtime; everything before it needs torch and transformers, which take
seconds and hundreds of megabytes on a small device. So a package that has both in it only says where its names live.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> Callable[[str], Any]:
    """A `__getattr__` for a package: module → the names that it gives to the package, and whole submodules.

    No name may be that of a submodule it comes from: Python puts the submodule there once it is loaded.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name in home_of:
            return getattr(importlib.import_module(home_of[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
