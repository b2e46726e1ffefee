"""What the process runs in: variables that libraries read when they are loaded, processors, memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULTS = {
    # Worker threads that spin while they wait take the cores from whoever else needs them, and then wait for each
    # other: on a busy machine two spinning threads are slower than one. Read when torch loads its OpenMP.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Where torch allocates by mimalloc (Linux on ARM), freed memory goes back to the system after 10 ms, and the next
    # tensor of the same size pays for every page again: a tenth of a forward's time. Two seconds keep the buffers of a
    # loop and still give memory back between stages.
    "MIMALLOC_PURGE_DELAY": "2000",
}

SPINS = "1000"


def set_defaults() -> None:
    """Sets what the user has not set. Comes before the first import of torch; later it changes nothing."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def briefly_spinning() -> Iterator[None]:
    """For a library that is loaded within and brings OpenMP along: its threads spin for some microseconds, then sleep.

    llama.cpp's wait for each other hundreds of times in a token. Two threads that sleep at once (what `DEFAULTS` says,
    and PyTorch wants) lose a fifth of their speed by it, and threads that spin for long stand still when another
    process wants their cores. What the user has set stays.
    """
    name = "GOMP_SPINCOUNT"
    if name in os.environ or os.environ.get("OMP_WAIT_POLICY", "PASSIVE") != DEFAULTS["OMP_WAIT_POLICY"]:
        yield
        return
    os.environ[name] = SPINS
    try:
        yield
    finally:
        del os.environ[name]


def for_child() -> dict[str, str]:
    """The environment of a Python of our own making: what can be imported here can be imported there."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """What the system calls the processor; on ARM the numbers of its maker and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = (said[key] for key in ("CPU implementer", "CPU part") if key in said)
    return said.get("model name") or " ".join((platform.machine(), *numbers))


def peak_memory() -> int:
    """The most bytes that this process has had in memory, or the one that started it, if that had more."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int:
    """Bytes that a process could take now without the system having to swap."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux: what there is in all
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
