"""How far long work is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Progress:
    """What a progress display needs; the command line replaces the callbacks."""

    # Total work, work already done.
    started: Callable[[float, float], None] = lambda total, done: None
    advanced: Callable[[float, str], None] = lambda work, what: None
    message: Callable[[str], None] = lambda text: None

    def as_one(self, expected: float) -> Progress:
        """Shows several pieces of work as one of at least the expected amount."""
        done = 0.0

        def started(total: float, already: float) -> None:
            nonlocal done
            whole = max(expected, done + total)
            done += already
            self.started(whole, done)

        def advanced(work: float, what: str) -> None:
            nonlocal done
            done += work
            self.advanced(work, what)

        return Progress(started, advanced, self.message)
