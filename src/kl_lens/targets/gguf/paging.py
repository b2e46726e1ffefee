"""Returns mapped pages to the system while llama.cpp repacks what they hold.

llama.cpp maps the whole file and copies tensors into the order its kernels want. The pages stay, so the model is in
memory twice. They can be dropped once read: what is still used from the file (rows of the embedding, norms) comes back
from the system's cache when it is touched. Linux, from version 6.18 on, then maps all of the large piece of its
cache that the page lies in, 2 MB of matrices for a norm of 10 KB, but never beyond the mapping: large tensors get their
own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from kl_lens.targets.gguf.header import TensorEntry

_MAPS = Path("/proc/self/maps")
_DONT_NEED, _DONT_DUMP = 4, 16  # the latter splits a mapping, and else changes only what a core dump holds
_LARGE, _PIECE = (
    1 << 20,
    64 << 10,
)  # bytes: tensors apart from others, and what one row of the embedding may bring back
# Of an embedding: a process may have 65,530 mappings, and threads and buffers need some.
_MOST_PIECES = 2048
_EMBEDDING = "token_embd.weight"
# Between two times: of the file, and bytes, since looking for its pages takes time.
_STEP, LEAST = 0.02, 32 << 20
can_give_back = sys.platform == "linux" and _MAPS.is_file()

# bool (*)(float progress, void * user_data)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


def give_back(paths: Iterable[Path]) -> None:
    """Read-only, shared mappings of these files only: nothing can be lost."""
    for path in paths:
        for start, end, _ in mappings_of(path):
            _advise(start, end, _DONT_NEED)


def set_apart(tensors: Iterable[TensorEntry]) -> None:
    """Large tensors in mappings of their own, and the embedding, of which a token needs a row, in many."""
    stretches: dict[Path, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if tensor.bytes >= _LARGE:
            stretches.setdefault(tensor.path, []).extend(stretches_of(tensor))
    for (start, end, offset), own in ((m, own) for path, own in stretches.items() for m in mappings_of(path)):
        for first, last in own:
            if not _advise(max(start, start + first - offset), min(end, start + last - offset), _DONT_DUMP):
                return  # the system has enough of them; the rest stays as it is


def stretches_of(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    """Of the file's bytes, those of a tensor that get a mapping of their own: all, or every other piece."""
    end = tensor.offset + tensor.bytes
    if tensor.name != _EMBEDDING:
        yield tensor.offset, end
        return
    piece = max(_PIECE, tensor.bytes // _MOST_PIECES)
    for first in range(tensor.offset, end, 2 * piece):
        yield first, min(first + piece, end)


def mappings_of(path: Path) -> list[tuple[int, int, int]]:
    """Where the file is in memory, read-only and shared: start, end, and from which of its bytes on."""
    found = []
    for line in _MAPS.read_text(errors="replace").splitlines():
        place, access, offset, *_, name = line.split(maxsplit=5)
        if access == "r--s" and name == str(path.resolve()):
            start, end = (int(each, 16) for each in place.split("-"))
            found.append((start, end, int(offset, 16)))
    return found


def _advise(start: int, end: int, what: int) -> bool:
    """On the whole pages of a stretch of memory; whether the system took it."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return first >= last or _madvise()(first, last - first, what) == 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def giving_back(paths: Sequence[Path]) -> Callable[[float, object], bool]:
    """What llama.cpp calls before each tensor, with the share that is done."""
    last, step = 0.0, max(_STEP, LEAST / sum(path.stat().st_size for path in paths))

    def advanced(progress: float, _: object) -> bool:
        nonlocal last
        if not last <= progress < last + step:
            give_back(paths)
            last = progress
        return True

    return advanced
