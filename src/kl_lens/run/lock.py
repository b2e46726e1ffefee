"""The lock of a run folder: one process at a time may write; another is told which one.

The system releases the lock when the process ends. Reading, also for a report, needs no lock.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from kl_lens.base.errors import RunError

_FILE = ".lock"
_held: dict[str, tuple[int, int]] = {}  # folder → file handle, and how often this process holds it


class Hold:
    """Holds the folder until `release`; the same process may take it several times."""

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
        return  # the file system has no locks
    since = time.strftime("%H:%M:%S")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} ({shlex.join(command)[:1000]}, since {since})\n".encode(), 0)
