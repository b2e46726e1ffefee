"""`kl-lens doctor`: one row for each part, and how to fix problems."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.study.doctor import DoctorResult


def as_json(result: DoctorResult) -> dict[str, Any]:
    return {name: asdict(health) for name, health in result.parts.items()}


def show(result: DoctorResult) -> None:
    out = console()
    table = new_table("", ("part", "found", "problem"))
    for name, health in result.parts.items():
        table.add_row(name, "\n".join([health.runtime or "nothing", *health.facts]), health.problem or "none")
    out.print(table)
    mends = dict.fromkeys(health.mend for health in result.parts.values() if health.problem and health.mend)
    for command in mends:
        out.print(f"To fix it: {command}", markup=False, soft_wrap=True)
    if not any(health.problem for health in result.parts.values()):
        out.print("No problems found.")
