"""Returns mapped pages to the system while llama.cpp repacks their tensors.

llama.cpp maps the whole file and copies tensors into the order that its kernels need. The mapped pages stay, so the
model is in memory twice. They can be dropped once read: whatever is still used from the file (rows of the embedding,
norms) comes back from the system's cache on access. From Linux 6.18 on, one access maps the whole large folio of the
cache, for example 2 MB of matrices for a norm of 10 KB, but never beyond the mapping. So large tensors get mappings of
their own.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from kl_lens.base.system import LINUX
from kl_lens.targets.gguf.header import TensorEntry

_MAPS = Path("/proc/self/maps")
_DONT_NEED = 4
_DONT_DUMP = 16  # the latter splits a mapping; otherwise it affects only core dumps
# Bytes: smallest tensor with its own mapping; piece of the embedding.
_LARGE = 1 << 20
_PIECE = 64 << 10
# Most pieces of an embedding: a process may have 65,530 mappings, and threads and buffers need some.
_MOST_PIECES = 2048
_EMBEDDING = "token_embd.weight"
# Least progress between two returns, as a share of the file and in bytes, because finding its pages takes time.
_STEP = 0.02
LEAST = 32 << 20
can_give_back = LINUX and _MAPS.is_file()

# bool (*)(float progress, void * user_data)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)


def give_back(paths: Iterable[Path]) -> None:
    """Drops pages of read-only shared mappings of these files; no data can be lost."""
    for path in paths:
        for start, end, _ in mappings_of(path):
            _advise(start, end, _DONT_NEED)


def set_apart(tensors: Iterable[TensorEntry]) -> None:
    """Gives large tensors their own mappings, and the embedding many, because a token needs one row of it."""
    stretches: dict[Path, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if tensor.bytes >= _LARGE:
            stretches.setdefault(tensor.path, []).extend(stretches_of(tensor))
    for (start, end, offset), ranges in (
        (m, ranges) for path, ranges in stretches.items() for m in mappings_of(path)
    ):
        for first, last in ranges:
            if not _advise(
                max(start, start + first - offset),
                min(end, start + last - offset),
                _DONT_DUMP,
            ):
                return  # too many mappings; leave the rest as it is


def stretches_of(tensor: TensorEntry) -> Iterator[tuple[int, int]]:
    """Byte ranges of a tensor that get their own mapping: all of it, or every other piece."""
    end = tensor.offset + tensor.bytes
    if tensor.name != _EMBEDDING:
        yield tensor.offset, end
        return
    piece = max(_PIECE, tensor.bytes // _MOST_PIECES)
    for first in range(tensor.offset, end, 2 * piece):
        yield first, min(first + piece, end)


def mappings_of(path: Path) -> list[tuple[int, int, int]]:
    """The file's read-only shared mappings: start, end, and offset in the file."""
    mappings = []
    for line in _MAPS.read_text(errors="replace").splitlines():
        span, access, offset, *_, name = line.split(maxsplit=5)
        if access == "r--s" and name == str(path.resolve()):
            start, end = (int(address, 16) for address in span.split("-"))
            mappings.append((start, end, int(offset, 16)))
    return mappings


def _advise(start: int, end: int, advice: int) -> bool:
    """Calls madvise on the whole pages within a range. Returns whether it succeeded."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    return first >= last or _madvise()(first, last - first, advice) == 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def giving_back(paths: Sequence[Path]) -> Callable[[float, object], bool]:
    """A callback that llama.cpp calls before each tensor with its progress."""
    last = 0.0
    step = max(_STEP, LEAST / sum(path.stat().st_size for path in paths))

    def advanced(progress: float, _: object) -> bool:
        nonlocal last
        if not last <= progress < last + step:
            give_back(paths)
            last = progress
        return True

    return advanced
