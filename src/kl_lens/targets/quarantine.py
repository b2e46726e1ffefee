"""Opens files from elsewhere in a separate process first. On some files a native runtime crashes, hangs or takes all
memory; in a separate process that becomes an error about the file.

python -m kl_lens.targets.quarantine MODULE:FUNCTION PLACE FILES…: calls that function with the place.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kl_lens.base.environment import for_child
from kl_lens.base.errors import TargetError, one_line, printable

# Time limit: one second per so many bytes, plus enough for the libraries to load on a busy machine.
_SECONDS = 120
_BYTES_PER_SECOND = 20_000_000
# Memory limit: enough for libraries and small models, plus room for runtimes that expand compressed weights.
_MEMORY = 3 << 29
_MEMORY_PER_BYTE = 16
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
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, function, str(path), *map(str, files)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(f"{path}: {runtime} hangs on it; {again}") from None
    lines = [
        line
        for line in process.stderr.decode(errors="replace").splitlines()
        if line.strip()
    ]
    last = printable(one_line(Exception(lines[-1]))) if lines else ""
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        complaint = f" ({last})" if last else ""
        raise TargetError(
            f"{path}: {runtime} crashes on it with {name}{complaint}; {again}"
        )
    if process.returncode:
        reason = last or f"opening it ended with {process.returncode}"
        raise TargetError(reason if str(path) in reason else f"{path}: {reason}; {again}")
    _stood.add(stamp)


def main() -> int:
    (module, _, function), path, *files = sys.argv[1].partition(":"), *sys.argv[2:]
    most = _MEMORY + _MEMORY_PER_BYTE * sum(os.path.getsize(file) for file in files)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        getattr(importlib.import_module(module), function)(Path(path))
    except MemoryError:
        print(
            f"{path}: opening it takes more than {most >> 20} MB of memory",
            file=sys.stderr,
        )
        return 1
    except Exception as error:
        print(one_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
