"""What operating systems and processors differ in: locks, open files, memory, names of processors. Nothing else in
KL Lens asks which one it runs on, except for functions that only one has.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

LINUX = sys.platform == "linux"
MACOS = sys.platform == "darwin"
WINDOWS = sys.platform == "win32"
_MACHINE = platform.machine().lower()
ON_X86 = _MACHINE in ("x86_64", "amd64")  # Windows calls it AMD64
ON_ARM = _MACHINE in ("aarch64", "arm64")  # macOS and Windows call it arm64, ARM64

# Seconds between attempts on Windows, where a virus scanner opens every new file for a moment.
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
_LOCK_PAUSE = 0.02
# On Windows locked bytes cannot be read by others: these lie behind any content.
_LOCKED_BYTE = 1 << 30
_FOLDER_LOCK = ".locked"
_READING = threading.Lock()

# -- locks and open files --------------------------------------------------------------------------------------

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> None:
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

    def _most_memory_had() -> int:
        import psutil

        return psutil.Process().memory_info().peak_wset

else:
    import fcntl
    import resource

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _most_memory_had() -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * 1024 if LINUX else peak


def lock(handle: int, *, wait: bool) -> bool:
    """Whether this process has the lock, until the handle is closed; True on file systems without locks."""
    while True:
        try:
            _try_lock(handle)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            if not wait:
                return False
            time.sleep(_LOCK_PAUSE)
        else:
            return True


@contextmanager
def locked_folder(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Whether this process alone has the folder, within. Windows cannot open folders: there a file in it is locked."""
    path = folder / _FOLDER_LOCK if WINDOWS else folder
    handle = os.open(path, os.O_RDWR | os.O_CREAT if WINDOWS else os.O_RDONLY)
    try:
        yield lock(handle, wait=wait)
    finally:
        os.close(handle)
        if WINDOWS:
            with suppress(OSError):  # another process may have it open
                path.unlink()


def remove_locked(path: Path, handle: int) -> None:
    """Removes a file and closes its handle. The lock is held to the end, except on Windows, where open files stay."""
    if WINDOWS:
        os.close(handle)
        with suppress(OSError):
            path.unlink()
    else:
        path.unlink(missing_ok=True)
        os.close(handle)


def rename_over(source: Path, destination: Path) -> None:
    """Renames a file or folder. On Windows an open file cannot be replaced: it is tried again for a moment, and then
    the error names that one."""
    error: OSError | None = None
    for pause in _PAUSES if WINDOWS else ():
        try:
            os.replace(source, destination)
        except PermissionError as refusal:
            error = PermissionError(refusal.errno, refusal.strerror, str(destination))
            time.sleep(pause)
        else:
            return
    if error is not None:
        raise error
    os.replace(source, destination)


def read_at(file: FileIO, view: memoryview, offset: int) -> int:
    """Reads bytes from a place in a file that several threads read; how many."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], offset)
    with _READING:
        file.seek(offset)
        return file.readinto(view) or 0


# -- processors and memory -------------------------------------------------------------------------------------


def processors() -> int:
    """Number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Bytes for cached states and outputs, unless the user says otherwise; on a GPU, most of what is free there.
DEFAULT_MEMORY = 8 * 10**9


def available_memory() -> int:
    """Free memory in bytes, without swapping."""
    import psutil  # here, because it takes time to load

    return psutil.virtual_memory().available


def resident_memory() -> int:
    """Of this process, in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Most resident memory that this process had, in bytes."""
    # Not getrusage on Linux: a child inherits the peak of the process that started it.
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return _most_memory_had()


def limit_memory(most: int) -> None:
    """Allocations of this process beyond `most` bytes fail, where the system can do that. Others must be watched."""
    if LINUX:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


# -- processes -------------------------------------------------------------------------------------------------


def crash_of(code: int) -> str | None:
    """What ended a process that did not end by itself: a signal, or a status of Windows such as 0xC0000005."""
    if code < 0:
        return signal.Signals(-code).name
    return f"status 0x{code:X}" if code > 0xFFFF else None


def is_broken_pipe(error: BaseException | None) -> bool:
    """Windows calls it an invalid argument."""
    invalid = WINDOWS and isinstance(error, OSError) and error.errno == errno.EINVAL
    return isinstance(error, BrokenPipeError) or invalid
