"""The benchmark program that publications about a runtime quote, where there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AppReport:
    """What the program printed at its end."""

    iterations: int
    duration_seconds: float
    median_ms: float
    average_ms: float
    min_ms: float
    max_ms: float
    throughput_fps: float
    threads: int | None = None  # that the runtime chose, where it says


class PublishedProgram(ABC):
    """How to call it and read its output; `profiling` decides when and how often."""

    @abstractmethod
    def input_shapes(self, place: Path) -> str | None:
        """The shapes that an artifact's inputs are given; None when all of them are fixed."""

    @abstractmethod
    def command(
        self, place: Path, *, seconds: int, iterations: int, device: str, threads: int | None, beside: Path
    ) -> list[str]:
        """The words to call it with; a file of settings, where it needs one, is written to `beside`."""

    @abstractmethod
    def read(self, text: str) -> AppReport:
        """What it printed; TargetError with its own complaint when that is no report."""

    def complaint(self, text: str) -> str:
        """Its last line: where it fails, the innermost reason."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (lines or ["it printed nothing"])[-1]
