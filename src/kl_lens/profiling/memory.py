"""Resident memory of this process, and the record of a fresh process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.environment import peak_memory
from kl_lens.run.records import Record

_STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak) of this process, in bytes."""
    if _STATUS.is_file():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return peak_memory()  # macOS has no /proc, only the peak


@dataclass(frozen=True)
class MemoryUse(Record):
    """Resident memory of one fresh process, mapped pages of the model's file included."""

    base_bytes: int  # the interpreter and its libraries, before the model is loaded
    peak_bytes: int  # largest, from start to end
    load_seconds: float  # loading without a graph compiled earlier

    @property
    def model_bytes(self) -> int:
        """Memory added by loading and running the model."""
        return self.peak_bytes - self.base_bytes
