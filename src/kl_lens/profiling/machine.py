"""The limits of the machine: memory bandwidth, matmul rate, cache size.

Always measured, never looked up: the bound of a benchmark is only useful if it was measured at the same time, on the
same machine, under the same load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt
import psutil
import torch

from kl_lens.base.environment import processors

MIB = 1 << 20
SMALLEST_BUFFER = 256 * MIB
_CACHES = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache(root: Path = _CACHES) -> int | None:
    """Total size of the last-level caches; None if unknown."""
    level, sizes = 0, dict[str, int]()
    for index in sorted(root.glob("cpu[0-9]*/cache/index*")):
        try:
            this = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        size = int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)
        if this > level:
            level, sizes = this, {}
        if this == level:
            sizes[shared] = size
    return sum(sizes.values()) or None


@dataclass(frozen=True)
class Bandwidth:
    """Read bandwidth of memory in bytes per second."""

    best: float  # the bound: whatever disturbs a repeat makes it slower, never faster
    median: float
    threads: int
    buffer_bytes: int
    repeats: int


@numba.njit(parallel=True, cache=True)
def summed(values: npt.NDArray[np.int64], parts: int) -> int:
    """Each thread reads one part of the buffer."""
    sums = np.zeros(parts, np.int64)
    size = values.size // parts
    for part in numba.prange(parts):
        # A slice, not an offset: otherwise the loop is not vectorised and too slow to be limited by memory.
        own = values[part * size : (part + 1) * size]
        partial = np.int64(0)
        for index in range(own.size):
            partial += own[index]
        sums[part] = partial
    return sums.sum()


@numba.njit(parallel=True, cache=True)
def summed_by_eight(values: npt.NDArray[np.int64], parts: int) -> int:
    """Each thread reads eight parts at once: 1.4 times as fast on some processors."""
    sums = np.zeros(parts, np.int64)
    size = values.size // parts // 8 * 8
    for part in numba.prange(parts):
        own = values[part * size : (part + 1) * size].reshape(8, -1)
        partial = np.int64(0)
        for i in range(own.shape[1]):
            first, second = own[0, i] + own[1, i], own[2, i] + own[3, i]
            third, fourth = own[4, i] + own[5, i], own[6, i] + own[7, i]
            partial += (first + second) + (third + fourth)
        sums[part] = partial
    return sums.sum()


@numba.njit(parallel=True, cache=True)
def _fill(values: npt.NDArray[np.int64], parts: int) -> None:
    size = values.size // parts
    for part in numba.prange(parts):
        end = values.size if part == parts - 1 else (part + 1) * size
        for index in range(part * size, end):
            values[index] = index


def read_bandwidth(
    threads: int | None = None, *, buffer_bytes: int | None = None, repeats: int = 5
) -> Bandwidth:
    """Sums a buffer larger than the caches, each thread its own part."""
    threads = min(threads or processors(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if buffer_bytes is None:
        wanted = max(SMALLEST_BUFFER, 4 * (last_level_cache() or 0))
        buffer_bytes = min(wanted, psutil.virtual_memory().available // 4)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        values = np.empty(max(buffer_bytes // 8, 8 * threads), np.int64)
        _fill(values, threads)  # by the thread that reads it, so that it lies on the same socket
        rates = max((_rates(read, values, threads, repeats) for read in (summed, summed_by_eight)), key=max)
    finally:
        numba.set_num_threads(before)
    return Bandwidth(max(rates), statistics.median(rates), threads, values.nbytes, repeats)


def _rates(
    read: Callable[[npt.NDArray[np.int64], int], int],
    values: npt.NDArray[np.int64],
    threads: int,
    repeats: int,
) -> list[float]:
    read(values, threads)  # compiles
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        read(values, threads)
        rates.append(values.nbytes / (time.perf_counter() - started))
    return rates


def matmul_rate(
    rows: int = 1024, inner: int = 768, columns: int = 3072, *, threads: int | None = None, repeats: int = 5
) -> float:
    """Floating-point operations per second of a float32 matrix product: the best of several."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        a, b = torch.randn(rows, inner), torch.randn(columns, inner)
        best = 0.0
        for _ in range(repeats + 1):
            started = time.perf_counter()
            a @ b.T
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
        return best
    finally:
        torch.set_num_threads(before)


class LoadMeter:
    """Measures how much processor time other processes take, from now on."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def read(self) -> dict[str, float]:
        """Shares of the time: `stolen` by the host for other virtual machines, used by `others` here; empty if
        unknown."""
        spent = {name: now - self._before.get(name, 0.0) for name, now in _processor_seconds().items()}
        whole = spent.pop("whole", 0.0)
        return {name: min(1.0, max(0.0, value / whole)) for name, value in spent.items()} if whole > 0 else {}


def _processor_seconds() -> dict[str, float]:
    """Seconds since boot: whole, others, and stolen if the system reports it (Linux)."""
    try:
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    except (OSError, psutil.Error):
        return {}
    idle, stolen = times.idle + getattr(times, "iowait", 0.0), getattr(times, "steal", None)
    # Time of guests is in that of users already.
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    found = {"whole": whole, "others": whole - idle - (stolen or 0.0) - own.user - own.system}
    return found if stolen is None else found | {"stolen": stolen}


@dataclass(frozen=True)
class Machine:
    """The limits used by the bounds."""

    bandwidth: Bandwidth  # with all threads
    matmul_rate: float  # float32 operations per second, all threads
    last_level_cache: int | None
    bandwidth_at_threads: Bandwidth | None = None  # with the benchmark's threads, if fewer


def measure_machine(threads: int | None = None) -> Machine:
    """Bandwidth and matmul rate with all threads; bandwidth also with `threads`, if fewer."""
    every = processors()
    return Machine(
        bandwidth=read_bandwidth(every),
        matmul_rate=matmul_rate(threads=every),
        last_level_cache=last_level_cache(),
        bandwidth_at_threads=read_bandwidth(threads) if threads and threads < every else None,
    )
