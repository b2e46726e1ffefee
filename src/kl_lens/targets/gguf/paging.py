"""Mapped pages are given back while llama.cpp repacks what they hold.

It maps the whole file and copies what its kernels want in another order, and the pages stay: the model is in memory
twice. They can go as soon as they were read: whatever is still used from the file (rows of the embedding, norms) comes
back from the system's cache when it is touched.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_DONT_NEED = 4
# Between two times: of the file, and bytes, since looking for its pages takes time.
_STEP, _LEAST = 0.02, 32 << 20
can_give_back = sys.platform == "linux" and _MAPS.is_file()

# bool (*)(float progress, void * user_data)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


def give_back(path: Path) -> None:
    """Read-only, shared mappings of this file only: nothing can be lost."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in _MAPS.read_text(errors="replace").splitlines():
        place, access, *_, name = line.split(maxsplit=5)
        if access == "r--s" and name == str(path.resolve()):
            start, end = (int(each, 16) for each in place.split("-"))
            advise(start, end - start, _DONT_NEED)


def giving_back(path: Path) -> Callable[[float, object], bool]:
    """What llama.cpp calls before each tensor, with the share that is done."""
    last, step = 0.0, max(_STEP, _LEAST / path.stat().st_size)

    def advanced(progress: float, _: object) -> bool:
        nonlocal last
        if not last <= progress < last + step:
            give_back(path)
            last = progress
        return True

    return advanced
