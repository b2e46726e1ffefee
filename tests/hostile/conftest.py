"""Says at the end how the commands on hostile input ended."""

from __future__ import annotations

from typing import Any

from tests.hostile.saying import TOLD


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TOLD:
        counts = ", ".join(f"{count} {how}" for how, count in sorted(TOLD.items()))
        terminalreporter.write_line(f"commands on hostile input: {counts}")
