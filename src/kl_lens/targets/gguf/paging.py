"""Mapped pages are given back while llama.cpp repacks what they hold.

It maps the whole file and copies what its kernels want in another order, and the pages stay: the model is in memory
twice. They can go as soon as they were read: whatever is still used from the file (rows of the embedding, norms) comes
back from the system's cache when it is touched. Linux, from version 6.18 on, then maps all of the large piece of its
cache that the page lies in, 2 MB of matrices for a norm of 10 KB, but never beyond the mapping: large tensors get their
own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kl_lens.targets.gguf.header import TensorEntry

_MAPS = Path("/proc/self/maps")
_DONT_NEED, _DONT_DUMP = 4, 16  # the latter splits a mapping, and else changes only what a core dump holds
_LARGE, _PIECE = (
    1 << 20,
    64 << 10,
)  # bytes: tensors apart from others, and what one row of the embedding may bring back
_EMBEDDING = "token_embd.weight"
# Between two times: of the file, and bytes, since looking for its pages takes time.
_STEP, _LEAST = 0.02, 32 << 20
can_give_back = sys.platform == "linux" and _MAPS.is_file()

# bool (*)(float progress, void * user_data)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


def give_back(path: Path) -> None:
    """Read-only, shared mappings of this file only: nothing can be lost."""
    for start, end, _ in _mappings(path):
        _advise(start, end, _DONT_NEED)


def set_apart(path: Path, tensors: Iterable[TensorEntry]) -> None:
    """Large tensors in mappings of their own, and the embedding, of which a token needs a row, in many."""
    mappings = _mappings(path)
    for tensor in tensors:
        if tensor.bytes < _LARGE:
            continue
        piece, step = (_PIECE, 2 * _PIECE) if tensor.name == _EMBEDDING else (tensor.bytes, tensor.bytes)
        for at in range(tensor.offset, tensor.offset + tensor.bytes, step):
            for start, end, offset in mappings:
                if offset <= at < offset + end - start:
                    first = start + at - offset
                    _advise(first, min(first + piece, end), _DONT_DUMP)


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """Where the file is in memory, read-only and shared: start, end, and from which of its bytes on."""
    found = []
    for line in _MAPS.read_text(errors="replace").splitlines():
        place, access, offset, *_, name = line.split(maxsplit=5)
        if access == "r--s" and name == str(path.resolve()):
            start, end = (int(each, 16) for each in place.split("-"))
            found.append((start, end, int(offset, 16)))
    return found


def _advise(start: int, end: int, what: int) -> None:
    """On the whole pages of a stretch of memory."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        advise(first, last - first, what)


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
