"""An unexpected error: one line for the user, the traceback in a file to report it with."""

from __future__ import annotations

import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kl_lens.base.errors import one_line

EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


def unexpected(error: BaseException, words: Sequence[str]) -> str:
    """The line, once traceback, versions and command are written to the run's log or the temporary folder."""
    kind = type(error).__name__
    reason = one_line(error)
    line = f"unexpected error: {kind}" + ("" if reason == kind else f": {reason}")
    for folder in _folders(words):
        with suppress(Exception):
            folder.mkdir(exist_ok=True)
            file = (
                folder / f"unexpected-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.txt"
            )
            file.write_text(_report(error, words), encoding="utf-8", errors="backslashreplace")
            return f"{line}; please report it with {file}"
    return f"{line}; please report it (the traceback could not be written: --debug shows it)"


def _folders(words: Sequence[str]) -> list[Path]:
    """The log of the run that the command names, if it names one; then where anybody may write."""
    folders = []
    for word in words:
        with suppress(OSError, ValueError):
            folder = Path(word.partition("=")[2] if word.startswith("--run=") else word)
            if (folder / "run.sqlite").is_file():
                folders.append(folder / "log")
    return [*folders, Path(tempfile.gettempdir())]


def _report(error: BaseException, words: Sequence[str]) -> str:
    from kl_lens.run.folder import provenance

    known = provenance()
    versions = "".join(f"{name} {version}\n" for name, version in known["versions"].items())
    trace = "".join(traceback.format_exception(error))
    return f"$ kl-lens {shlex.join(words)}\n\n{trace}\n{versions}{known['system']} {known['machine']}\n"
