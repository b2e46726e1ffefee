"""The limit of the machine, what else kept it busy, and how many times as fast one file is as another.

Generating one token reads every weight of the model once (of an untied embedding only one row, of a mixture of experts
only the chosen experts), the states, and the keys and values of all earlier tokens. No runtime can be faster than
memory delivers these bytes:

    tokens/s ≤ read bandwidth / bytes per token

The bandwidth is measured beside the timings, never looked up. A model that fits into the caches is not read from memory
at all: then the share exceeds 1, and the bound says nothing.

Whatever disturbs a token makes it slower, never faster. So a turn of a few tokens counts as its fastest one, and a file
as the low quantile of its turns. The interval of a ratio is a bootstrap over turns: both files are drawn together,
because disturbances longer than a turn affect both. It is widened to include the ratio of the very fastest turns: if
those differ much from the low quantile, most turns were disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import psutil

from kl_lens.base.compiling import get_num_threads, njit, prange
from kl_lens.base.system import processors
from kl_lens.run.records import Quartiles
from kl_lens.targets.abilities import Contents

BUFFER_BYTES = 1 << 30
REPEATS = 5  # larger than caches
LOW = 0.1  # quantile of turns that represents a file
CONFIDENCE = 0.95
DRAWS = 1000
FEWEST_TURNS = 5


def bound_of(
    contents: Contents, bandwidth: float, context: float, tokens_per_second: float
) -> dict[str, float]:
    """Bytes per token, the bound on tokens/s, and the achieved share of it."""
    read = contents.bytes_per_token(context)
    limit = bandwidth / read
    rates = {"tokens_per_second": limit, "share": tokens_per_second / limit}
    return {"bytes_per_token": read, "read_bandwidth": bandwidth} | rates


def limits_hold(device: str) -> bool:
    """Whether the machine's limit applies to this device; GPUs and NPUs have their own memory."""
    return not device.upper().startswith(("GPU", "NPU"))


def read_bandwidth() -> float:
    """Bytes per second that all threads read: the best of several, as a disturbance makes a repeat only slower."""
    threads = min(processors(), get_num_threads())
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


@njit(parallel=True, cache=True)
def fill(values: npt.NDArray[np.int64], parts: int) -> None:
    """Each part is written by the thread that will read it, so that it lies on the same socket."""
    size = values.size // parts
    for part in prange(parts):
        for index in range(part * size, (part + 1) * size):
            values[index] = index


@njit(parallel=True, cache=True)
def summed(values: npt.NDArray[np.int64], parts: int) -> int:
    """Each thread reads eight stretches at once, 1.4 times as fast as one on some processors."""
    sums = np.zeros(parts, np.int64)
    size = values.size // parts
    for part in prange(parts):
        # A slice, not an offset: otherwise the loop is not vectorised and too slow to be limited by memory.
        rows = values[part * size : (part + 1) * size].reshape(8, -1)
        partial = np.int64(0)
        for i in range(rows.shape[1]):
            first = rows[0, i] + rows[1, i]
            second = rows[2, i] + rows[3, i]
            third = rows[4, i] + rows[5, i]
            fourth = rows[6, i] + rows[7, i]
            partial += (first + second) + (third + fourth)
        sums[part] = partial
    return sums.sum()


class LoadMeter:
    """Which share of the processors' time others used since the meter was made."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def read(self) -> dict[str, float]:
        """`stolen` by the host for other virtual machines, used by `others` here; empty if unknown."""
        spent = {
            name: seconds - self._before.get(name, 0.0)
            for name, seconds in _processor_seconds().items()
        }
        whole = spent.pop("whole", 0.0)
        if whole <= 0:
            return {}
        return {name: min(1.0, max(0.0, value / whole)) for name, value in spent.items()}


def _processor_seconds() -> dict[str, float]:
    """Seconds since boot: whole, others, and stolen if the system reports it (Linux)."""
    try:
        times = psutil.cpu_times()
        process = psutil.Process().cpu_times()
    except (OSError, psutil.Error):
        return {}
    idle = times.idle + getattr(times, "iowait", 0.0)
    stolen = getattr(times, "steal", None)
    # Time of guests is in that of users already.
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    used = whole - idle - (stolen or 0.0) - process.user - process.system
    seconds = {"whole": whole, "others": used}
    return seconds if stolen is None else seconds | {"stolen": stolen}


# -- ratios --------------------------------------------------------------------------------------------------


def spread_of(values: Sequence[float]) -> Quartiles:
    """Median and quartiles (linear interpolation)."""
    low, median, high = (
        float(v) for v in np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    )
    return Quartiles(median, low, high, len(values))


def compared(seconds: Sequence[float], base: Sequence[float]) -> Quartiles | None:
    """Speed relative to the base with its 95 % interval, from seconds of the same turns; None if there are too few."""
    turns = min(len(base), len(seconds))
    times = np.array([base[:turns], seconds[:turns]], np.float64)
    if turns < FEWEST_TURNS:
        return None
    draws = np.random.default_rng(0).integers(0, turns, (DRAWS, turns))
    drawn = times[:, draws]  # (2, draws, turns)
    above, below = np.quantile(drawn, LOW, axis=-1)
    tail = (1 - CONFIDENCE) / 2
    quickest = times[0].min() / times[1].min()
    ends = *np.quantile(above / below, (tail, 1 - tail)), quickest
    above, below = np.quantile(times, LOW, axis=-1)
    return Quartiles(float(above / below), float(min(ends)), float(max(ends)), turns)
