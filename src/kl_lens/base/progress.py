"""How far long work is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Progress:
    """What a progress display needs; the command line replaces the callbacks."""

    # Total work, work already done.
    started: Callable[[float, float], None] = lambda total, completed: None
    advanced: Callable[[float, str], None] = lambda work, label: None
    message: Callable[[str], None] = lambda text: None

    def as_one(self, expected: float) -> Progress:
        """Shows several pieces of work as one of at least the expected amount."""
        completed = 0.0

        def started(total: float, already: float) -> None:
            nonlocal completed
            whole = max(expected, completed + total)
            completed += already
            self.started(whole, completed)

        def advanced(work: float, label: str) -> None:
            nonlocal completed
            completed += work
            self.advanced(work, label)

        return Progress(started, advanced, self.message)
