"""The CSV files in docs/results, written by the benchmarks: machine, date and commit on every row."""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from functools import cache
from pathlib import Path

from kl_lens.base.files import whole

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; `told`: its help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "write the rows to this file; a row that was measured before is replaced"
    parser.add_argument("--write", type=Path, metavar="FILE.csv", help=text)
    return parser


@cache
def provenance() -> Row:
    def git(*words: str) -> str:
        return subprocess.run(
            ("git", *words), cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    changed = (
        "-dirty" if git("diff", "--name-only", "HEAD", "--", "src", "benchmarks") else ""
    )
    commit = git("rev-parse", "--short", "HEAD") + changed
    return {
        "machine": processor_name(),
        "date": date.today().isoformat(),
        "commit": commit,
    }


def processor_name() -> str:
    """The processor's name; on ARM its implementer and part numbers."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in lines)
    }
    numbers = (fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
    return fields.get("model name") or " ".join((platform.machine(), *numbers))


def read(path: Path | None) -> list[Row]:
    return (
        list(csv.DictReader(path.open(encoding="utf-8")))
        if path and path.is_file()
        else []
    )


def write(path: Path | None, rows: Iterable[Row], key: Sequence[str]) -> None:
    """Adds rows; one with the same `key` as an older row replaces it. Without a path, nothing."""
    new = [row | provenance() | row for row in rows]
    old = read(path)
    if path is None or not new:
        return
    if old and set(old[0]) != set(new[0]):
        raise SystemExit(
            f"{path} has the columns {', '.join(old[0])}; these rows have {', '.join(new[0])}"
        )
    fresh = {tuple(row[name] for name in key) for row in new}
    with whole(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list((old or new)[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            row for row in old if tuple(row[name] for name in key) not in fresh
        )
        writer.writerows(new)


def write_speed(
    path: Path | None, case: Row, numbers: dict[tuple[str, str], str]
) -> None:
    """speed.csv: `case` has benchmark, model and threads; (variant, quantity) → "number" or "number ± spread"."""
    rows = []
    for (variant, quantity), number in numbers.items():
        value, _, spread = number.partition(" ± ")
        rows.append(
            {
                **case,
                "variant": variant,
                "quantity": quantity,
                "value": value,
                "spread": spread,
            }
        )
    write(path, rows, ("benchmark", "model", "variant", "threads", "quantity", "machine"))
