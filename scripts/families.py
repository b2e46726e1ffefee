"""Writes the tables of families into README.md and docs/models.md, from docs/families.json.

`python scripts/families.py` writes them between the markers; `--check` only says which page is out of date. The data
comes from `scripts/models.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- families -->\n).*?(<!-- /families -->)", re.DOTALL)
Row = dict[str, Any]


def _name(row: Row) -> str:
    return (
        str(row["family"])
        .removesuffix("_text")
        .replace("mamba2_groups", "mamba2 with several groups")
    )


def short(rows: list[Row]) -> Iterator[str]:
    """For README.md: families of which the same files can be written share a line."""
    yield "| family | OpenVINO | GGUF | MLX |"
    yield "|---|---|---|---|"
    groups: dict[tuple[bool, ...], list[str]] = {}
    for row in rows:
        lacks = tuple(not row[target] for target in ("gguf", "openvino", "mlx"))
        if row["recurrent"] or not all(lacks):
            groups.setdefault(lacks, []).append(_name(row))
    for lacks, names in sorted(groups.items()):
        gguf, openvino, mlx = ("–" if lacking else "✓" for lacking in lacks)
        yield f"| {', '.join(names)} | {openvino} | {gguf} | {mlx} |"


def full(rows: list[Row]) -> Iterator[str]:
    """For docs/models.md."""
    yield "| model | class | blocks | engines | float64 | OpenVINO | GGUF | MLX | why not, or limits |"
    yield "|---|---|---|---|---|---|---|---|---|"
    titles = {
        "measuring": "measuring",
        "openvino": "OpenVINO",
        "gguf": "GGUF",
        "mlx": "MLX",
    }
    for row in rows:
        marks = [
            str(row[p] or "–")
            for p in ("blocks", "engines", "float64", "openvino", "gguf", "mlx")
        ]
        why = "; ".join(
            f"{titles[part]}{', other configurations' if row.get(part) else ''}: {text}"
            for part, text in row["why"].items()
        )
        cells = [f"`{row['family']}`", row["kind"], *marks, why.replace("|", "\\|")]
        yield f"| {' | '.join(cells)} |"


def pages() -> Iterator[tuple[Path, str]]:
    """Each page, and what it should be."""
    rows = json.loads((ROOT / "docs/families.json").read_text("utf-8"))["families"]
    for name, table in (("README.md", short), ("docs/models.md", full)):
        text = (ROOT / name).read_text("utf-8")
        if not MARKED.search(text):
            sys.exit(
                f"{name}: no place for the table; put <!-- families --> and <!-- /families --> on lines of their own"
            )
        lines = "".join(f"{line}\n" for line in table(rows))
        yield (
            ROOT / name,
            MARKED.sub(lambda marks, lines=lines: marks[1] + lines + marks[2], text),
        )


def main(arguments: list[str]) -> None:
    old = [(path, text) for path, text in pages() if path.read_text("utf-8") != text]
    for path, text in old:
        if "--check" not in arguments:
            path.write_text(text, "utf-8")
    if old and "--check" in arguments:
        names = ", ".join(str(path.relative_to(ROOT)) for path, _ in old)
        sys.exit(
            f"{names}: not what docs/families.json says; run: python scripts/families.py"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
