"""Says at the end how the commands on hostile input ended, and what memory they took."""

from __future__ import annotations

from typing import Any

from tests.hostile.saying import PEAK, TOLD


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TOLD:
        counts = ", ".join(f"{count} {how}" for how, count in sorted(TOLD.items()))
        most = f"at most {PEAK['bytes'] / 1e6:.0f} MB for one"
        terminalreporter.write_line(f"commands on hostile input: {TOLD.total()}: {counts}; {most}")
