"""The limit of the machine, and what else kept it busy.

Generating one token reads every weight of the model once (of an untied embedding only one row, of a mixture of experts
only the chosen experts), the states, and the keys and values of all earlier tokens. No runtime can be faster than
memory delivers these bytes:

    tokens/s ≤ read bandwidth / bytes per token

The bandwidth is measured beside the timings, never looked up. A model that fits into the caches is not read from memory
at all: then the share exceeds 1, and the bound says nothing.
"""

from __future__ import annotations

import time

import numba
import numpy as np
import numpy.typing as npt
import psutil

from kl_lens.base.environment import processors
from kl_lens.targets.base import Contents

BUFFER_BYTES, REPEATS = 1 << 30, 5  # larger than caches


def bound_of(
    contents: Contents, bandwidth: float, context: float, tokens_per_second: float
) -> dict[str, float]:
    """Bytes per token, the bound on tokens/s, and the achieved share of it."""
    read = contents.bytes_per_token(context)
    limit = bandwidth / read
    return {
        "bytes_per_token": read,
        "read_bandwidth": bandwidth,
        "tokens_per_second": limit,
        "share": tokens_per_second / limit,
    }


def limits_hold(device: str) -> bool:
    """Whether the machine's limit applies to this device; GPUs and NPUs have their own memory."""
    return not device.upper().startswith(("GPU", "NPU"))


def read_bandwidth() -> float:
    """Bytes per second that all threads read: the best of several, as a disturbance makes a repeat only slower."""
    threads = min(processors(), numba.get_num_threads())
    size = min(BUFFER_BYTES, psutil.virtual_memory().available // 4)
    values = np.empty(size // 64 // threads * 8 * threads, np.int64)
    fill(values, threads)
    summed(values[: 8 * threads], threads)  # compiles
    best = 0.0
    for _ in range(REPEATS):
        started = time.perf_counter()
        summed(values, threads)
        best = max(best, values.nbytes / (time.perf_counter() - started))
    return best


@numba.njit(parallel=True, cache=True)
def fill(values: npt.NDArray[np.int64], parts: int) -> None:
    """Each part is written by the thread that will read it, so that it lies on the same socket."""
    size = values.size // parts
    for part in numba.prange(parts):
        for index in range(part * size, (part + 1) * size):
            values[index] = index


@numba.njit(parallel=True, cache=True)
def summed(values: npt.NDArray[np.int64], parts: int) -> int:
    """Each thread reads eight stretches at once, 1.4 times as fast as one on some processors."""
    sums = np.zeros(parts, np.int64)
    size = values.size // parts
    for part in numba.prange(parts):
        # A slice, not an offset: otherwise the loop is not vectorised and too slow to be limited by memory.
        own = values[part * size : (part + 1) * size].reshape(8, -1)
        partial = np.int64(0)
        for i in range(own.shape[1]):
            first, second = own[0, i] + own[1, i], own[2, i] + own[3, i]
            third, fourth = own[4, i] + own[5, i], own[6, i] + own[7, i]
            partial += (first + second) + (third + fourth)
        sums[part] = partial
    return sums.sum()


class LoadMeter:
    """Which share of the processors' time others used since the meter was made."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def read(self) -> dict[str, float]:
        """`stolen` by the host for other virtual machines, used by `others` here; empty if unknown."""
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
