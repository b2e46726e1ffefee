"""What the user is told when a command fails: one line; for an unexpected error also a file to report it with."""

from __future__ import annotations

import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kl_lens.base.errors import KLLensError, one_line, system_reason

UNEXPECTED = 70  # exit code; EX_SOFTWARE of sysexits.h


def explained(error: BaseException, words: Sequence[str]) -> tuple[int, str]:
    """The exit code of `kl-lens WORDS`, and the one line about it."""
    if isinstance(error, KLLensError):
        return error.exit_code, " ".join(str(error).split("\n"))
    if isinstance(error, OSError) and (line := system_reason(error)):
        return KLLensError.exit_code, line
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be loaded
        return KLLensError.exit_code, (
            f"GPU memory is full ({one_line(error).partition('. GPU')[0]}); what was measured is kept. Run the same "
            "command with --weights disk, or measure with a smaller --memory-budget"
        )
    kind, reason = type(error).__name__, one_line(error)
    line = f"unexpected error: {kind}" + ("" if reason == kind else f": {reason}")
    for folder in _folders(words):
        with suppress(Exception):
            folder.mkdir(exist_ok=True)
            time_of_day = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}"
            file = folder / f"unexpected-{time_of_day}.txt"
            file.write_text(_report(error, words), encoding="utf-8", errors="backslashreplace")
            return UNEXPECTED, f"{line}; please report it with {file}"
    return UNEXPECTED, f"{line}; please report it (the traceback could not be written: --debug shows it)"


def _folders(words: Sequence[str]) -> list[Path]:
    """The log of the run that the command names, if it names one; then the temporary folder."""
    folders = []
    for word in words:
        with suppress(OSError, ValueError):
            folder = Path(word.removeprefix("--run="))
            if (folder / "run.sqlite").is_file():
                folders.append(folder / "log")
    return [*folders, Path(tempfile.gettempdir())]


def _report(error: BaseException, words: Sequence[str]) -> str:
    from kl_lens.run.folder import provenance

    known = provenance()
    versions = "".join(f"{name} {version}\n" for name, version in known["versions"].items())
    trace = "".join(traceback.format_exception(error))
    return f"$ kl-lens {shlex.join(words)}\n\n{trace}\n{versions}{known['system']} {known['machine']}\n"
