"""The effect of one setting on speed and memory (threads, GPU layers, way of loading), and the best value.

Each point runs in its own process, so that threads and memory are separate, and values take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from kl_lens.profiling.fresh import fresh_process
from kl_lens.profiling.in_use import UseSettings
from kl_lens.profiling.memory import MemoryUse
from kl_lens.profiling.spread import spread_of
from kl_lens.profiling.subjects import Timed
from kl_lens.records import Quartiles, Record

SAME = 0.05  # smaller differences in speed do not count: the smaller value is taken


@dataclass(frozen=True)
class CurvePoint(Record):
    value: Any
    tokens_per_second: Quartiles
    peak_memory_bytes: int
    load_seconds: float


@dataclass(frozen=True)
class Curve(Record):
    subject: str
    setting: str  # threads, gpu_layers or load
    points: tuple[CurvePoint, ...]
    free_memory_bytes: int

    @property
    def best(self) -> CurvePoint:
        """The fastest that fits into memory. Of equally fast ones: the one with the least memory for `load`, otherwise
        the smallest value."""
        fitting = [p for p in self.points if p.peak_memory_bytes < self.free_memory_bytes]
        fitting = fitting or [min(self.points, key=lambda p: p.peak_memory_bytes)]
        fastest = max(p.tokens_per_second.median for p in fitting)
        as_fast = [p for p in fitting if p.tokens_per_second.median >= (1 - SAME) * fastest]
        return min(as_fast, key=lambda p: p.peak_memory_bytes) if self.setting == "load" else as_fast[0]


def measure_curve(
    subject: Timed,
    settings: UseSettings,
    setting: str,
    values: Sequence[Any],
    advanced: Callable[[str], None] = lambda what: None,
) -> Curve:
    """Compares `values` of one setting, smallest first."""
    uses: dict[Any, list[MemoryUse]] = {value: [] for value in values}
    for _ in range(settings.repeats):
        for value in values:
            runtime = replace(settings, **{setting: value}).runtime
            uses[value].append(fresh_process(subject.path, subject.target.name, runtime, settings.new_tokens))
            advanced(f"{subject.name}, {setting.replace('_', ' ')} {value}")
    points = (
        CurvePoint(
            value,
            spread_of([1 / use.seconds_per_token for use in found]),
            max(use.peak_bytes for use in found),
            min(use.load_seconds for use in found),
        )
        for value, found in uses.items()
    )
    return Curve(subject.name, setting, tuple(points), psutil.virtual_memory().available)
