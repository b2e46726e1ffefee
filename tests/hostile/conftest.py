"""Says at the end how the commands on hostile input ended, and what memory they took."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.hostile.saying import PEAK, TOLD


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not TOLD:
        return
    every: Counter[str] = Counter()
    for test in sorted({test for test, _ in TOLD}):
        ended = Counter({how: count for (name, how), count in TOLD.items() if name == test})
        every += ended
        if ended.total() >= 100:
            terminalreporter.write_line(f"  {test}: {_spelled(ended)}")
    most = f"at most {PEAK['bytes'] / 1e6:.0f} MB for one"
    terminalreporter.write_line(f"hostile input: {_spelled(every)}; {most}")


def _spelled(ended: Counter[str]) -> str:
    """Brackets are about other processes, not about how a command ended."""
    count = sum(n for how, n in ended.items() if not how.startswith("("))
    return f"{count:,} cases: " + ", ".join(f"{n:,} {how}" for how, n in sorted(ended.items(), reverse=True))
