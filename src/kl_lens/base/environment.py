"""Environment variables for libraries."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kl_lens.base.errors import KLLensError
from kl_lens.base.system import LINUX

DEFAULTS = {
    # Threads that spin while they wait take cores from other threads: on a busy machine two spinning threads are slower
    # than one. Read when torch loads OpenMP.
    "OMP_WAIT_POLICY": "PASSIVE",
    # With mimalloc (torch on Linux ARM), freed memory goes back to the system after 10 ms, and the next tensor of the
    # same size pays for every page again: a tenth of a forward's time. Two seconds keep the buffers of a loop and still
    # release memory between stages.
    "MIMALLOC_PURGE_DELAY": "2000",
}
if not LINUX:
    # On macOS and Windows several packages bring Intel's or LLVM's OpenMP; the second one would abort the process.
    DEFAULTS["KMP_DUPLICATE_LIB_OK"] = "TRUE"

SPINS = "1000"
# Prefixes of …_NUM_THREADS, which libraries read when they load, and the most that is accepted: with a million threads
# the process ends without a word.
THREAD_VARIABLES = ("OMP", "MKL", "OPENBLAS", "NUMBA")
_MOST_THREADS = 4096


def set_defaults() -> None:
    """Sets variables that the user has not set. Call before torch is first imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def quiet_libraries() -> None:
    """Libraries' own progress bars and advice would mix with ours. Most read this when they load."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    if transformers := sys.modules.get("transformers"):
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def require_thread_counts() -> None:
    """Raises for numbers of threads that libraries cannot use; some crash, others ignore them with a page of text."""
    for name in (f"{prefix}_NUM_THREADS" for prefix in THREAD_VARIABLES):
        value = os.environ.get(name) or "1"
        # OpenMP takes one per level.
        counts = value.split(",") if name.startswith("OMP") else [value]
        if not all(
            re.fullmatch("[0-9]{1,4}", n.strip()) and 1 <= int(n) <= _MOST_THREADS
            for n in counts
        ):
            raise KLLensError(
                f"{name}={value}: expected a number of threads from 1 to {_MOST_THREADS}; change it, or: unset {name}"
            )


@contextmanager
def briefly_spinning() -> Iterator[None]:
    """Around loading a library that brings OpenMP: its threads spin for some microseconds, then sleep.

    llama.cpp's threads wait for each other hundreds of times per token. With two threads, sleeping at once (the setting
    in `DEFAULTS`, which PyTorch needs) costs a fifth of the speed; spinning for long stalls when another process wants
    the cores. The user's own setting wins.
    """
    name = "GOMP_SPINCOUNT"
    if (
        name in os.environ
        or os.environ.get("OMP_WAIT_POLICY", "PASSIVE") != DEFAULTS["OMP_WAIT_POLICY"]
    ):
        yield
        return
    os.environ[name] = SPINS
    try:
        yield
    finally:
        del os.environ[name]


def for_child() -> dict[str, str]:
    """Environment for a child Python: it can import what this one can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
