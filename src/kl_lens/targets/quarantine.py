"""Opens files from elsewhere in a separate process first. On some files a native runtime crashes, hangs or takes all
memory; in a separate process that becomes an error about the file.

python -m kl_lens.targets.quarantine MODULE:FUNCTION PLACE FILES…: calls that function with the place.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from kl_lens.base.environment import for_child
from kl_lens.base.errors import TargetError, one_line, printable
from kl_lens.base.system import crash_of, limit_memory

# Time limit: one second per so many bytes, plus enough for the libraries to load on a busy machine.
_SECONDS = 120
_BYTES_PER_SECOND = 20_000_000
# Memory limit: enough for libraries and small models, plus room for runtimes that expand compressed weights.
_MEMORY = 3 << 29
_MEMORY_PER_BYTE = 16
_WATCH = 0.1  # seconds between two looks at the process
_stood: set[tuple[object, ...]] = (
    set()
)  # what was done with which files, with their sizes and times


def require_opens(
    try_out: Callable[[Path], None], path: Path, files: Sequence[Path], runtime: str
) -> None:
    """Raises TargetError if `try_out(place)` fails, crashes or hangs."""
    states = [file.stat() for file in files]
    function = f"{try_out.__module__}:{try_out.__name__}"
    stamp = (
        function,
        str(path.resolve()),
        *((state.st_size, state.st_mtime_ns) for state in states),
    )
    if stamp in _stood:
        return
    environment = for_child() | {
        "GGML_NO_BACKTRACE": "1"
    }  # otherwise it spends seconds in a debugger
    environment |= dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
    )  # each thread takes memory
    limit = _SECONDS + sum(state.st_size for state in states) / _BYTES_PER_SECOND
    again = "export or download it again"
    words = [function, str(path), *map(str, files)]
    try:
        code, said = _watched(words, environment, limit, _most_memory(files))
    except TimeoutError:
        raise TargetError(f"{path}: {runtime} hangs on it; {again}") from None
    except MemoryError as error:
        raise TargetError(f"{path}: {error}; {again}") from None
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    last = printable(one_line(Exception(lines[-1]))) if lines else ""
    if crash := crash_of(code):
        complaint = f" ({last})" if last else ""
        raise TargetError(
            f"{path}: {runtime} crashes on it with {crash}{complaint}; {again}"
        )
    if code:
        reason = last or f"opening it ended with {code}"
        raise TargetError(reason if str(path) in reason else f"{path}: {reason}; {again}")
    _stood.add(stamp)


def _most_memory(files: Sequence[Path]) -> int:
    return _MEMORY + _MEMORY_PER_BYTE * sum(os.path.getsize(file) for file in files)


def _watched(
    words: Sequence[str], environment: Mapping[str, str], seconds: float, most: int
) -> tuple[int, bytes]:
    """The exit code of `main` with these words, and what it said. Raises TimeoutError or MemoryError if it takes more
    time or, where it cannot limit itself, memory."""
    command = [sys.executable, "-m", __name__, *words]
    end = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=_WATCH)[1]
                    return process.returncode, said
                with suppress(psutil.Error):  # it has just ended
                    if psutil.Process(process.pid).memory_info().rss > most:
                        raise MemoryError(_too_much(most))
                if time.monotonic() > end:
                    raise TimeoutError
        finally:
            process.kill()


def _too_much(most: int) -> str:
    return f"opening it takes more than {most >> 20} MB of memory"


def main() -> int:
    (module, _, function), path, *files = sys.argv[1].partition(":"), *sys.argv[2:]
    most = _most_memory([Path(file) for file in files])
    limit_memory(most)
    try:
        getattr(importlib.import_module(module), function)(Path(path))
    except MemoryError:
        print(f"{path}: {_too_much(most)}", file=sys.stderr)
        return 1
    except Exception as error:
        print(one_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
