"""`kl-lens doctor`: one row for each part, and how to fix problems."""

from __future__ import annotations

from typing import Any

from kl_lens.cli.console import console, table
from kl_lens.study.doctor import DoctorResult


def as_json(result: DoctorResult) -> dict[str, Any]:
    return result.parts


def show(result: DoctorResult) -> None:
    out = console()
    rows = []
    for name, health in result.parts.items():
        found = "\n".join([health.runtime or "nothing", *health.facts])
        rows.append({"part": name, "found": found, "problem": health.problem or "none"})
    out.print(table("", rows))
    problems = [health for health in result.parts.values() if health.problem]
    for command in dict.fromkeys(health.mend for health in problems if health.mend):
        out.print(f"To fix it: {command}", markup=False, soft_wrap=True)
    if not problems:
        out.print("No problems found.")
