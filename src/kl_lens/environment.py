"""Settings of the libraries below us that can only be made by environment variables, before they are loaded."""

from __future__ import annotations

import os

DEFAULTS = {
    # Worker threads that spin while they wait take the cores from whoever else needs them, and then wait for each
    # other: on a busy machine two spinning threads are slower than one. Read when torch loads its OpenMP.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Where torch allocates by mimalloc (Linux on ARM), freed memory goes back to the system after 10 ms, and the next
    # tensor of the same size pays for every page again: a tenth of a forward's time. Two seconds keep the buffers of a
    # loop and still give memory back between stages.
    "MIMALLOC_PURGE_DELAY": "2000",
}


def set_defaults() -> None:
    """Sets what the user has not set. Comes before the first import of torch; later it changes nothing."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
