"""The benchmark program that publications about a runtime quote, if there is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AppReport:
    """The figures that the program printed."""

    iterations: int
    duration_seconds: float
    median_ms: float
    average_ms: float
    min_ms: float
    max_ms: float
    throughput_fps: float
    threads: int | None = None  # that the runtime chose, if it says so


class PublishedProgram(ABC):
    """How to call it and read its output; `profiling` decides when and how often."""

    @abstractmethod
    def input_shapes(self, place: Path) -> str | None:
        """The input shapes to pass; None if the artifact's are fixed."""

    @abstractmethod
    def command(
        self, place: Path, *, seconds: int, iterations: int, device: str, threads: int | None, beside: Path
    ) -> list[str]:
        """The command line. A settings file, if needed, is written to `beside`."""

    @abstractmethod
    def read(self, text: str) -> AppReport:
        """Parses its output. Raises TargetError with the program's own message if there is no report."""

    def complaint(self, text: str) -> str:
        """The program's last line, which on failure is the innermost reason."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (lines or ["it printed nothing"])[-1]
