"""One process at a time works in a run folder; another one is told who does.

The lock is the system's: it goes with its process, however that ends. Reading, also for a report, needs none.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from kl_lens.errors import RunError

_FILE = ".lock"
_held: dict[str, tuple[int, int]] = {}  # folder → its open lock, and how often this process has it


class Hold:
    """The folder is this process's until `release`; taken again by the same process, it is shared."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._key: str | None = os.path.realpath(folder)
        handle, times = _held.get(self._key, (-1, 0))
        if not times:
            handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _take(handle, folder, command)
            except BaseException:
                os.close(handle)
                raise
        _held[self._key] = handle, times + 1

    def release(self) -> None:
        if self._key is None:
            return
        handle, times = _held[self._key]
        if times > 1:
            _held[self._key] = handle, times - 1
        else:
            del _held[self._key]
            os.close(handle)
        self._key = None


def _take(handle: int, folder: Path, command: Sequence[str]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 4096, 0).decode(errors="replace").strip() or "another process"
        raise RunError(f"{folder} is in use by {holder}; wait for it, or use another --run") from None
    except OSError:
        return  # a file system that knows no locks
    since = time.strftime("%H:%M:%S")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} ({shlex.join(command)[:1000]}, since {since})\n".encode(), 0)
