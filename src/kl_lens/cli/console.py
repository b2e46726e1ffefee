"""Standard output for results, standard error for everything else."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `kl-lens generate` runs on small devices: libraries load in the functions that need them
    from rich.console import Console
    from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole when the output is a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 220, highlight=False)


def new_table(
    title: str, left: Sequence[str] = (), right: Sequence[str] = (), fold: Sequence[str] = ()
) -> Table:
    """A table with columns of words, then of numbers, then of long words."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    for column in fold:
        table.add_column(column, overflow="fold")
    return table


def print_json(data: Any) -> None:
    """Strict JSON: what is not a number (an error that is not defined) becomes null."""
    json.dump(_finite(data), sys.stdout, indent=1, allow_nan=False)
    print()


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
