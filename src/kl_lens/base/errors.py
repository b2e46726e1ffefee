"""Errors that a user can act on.

Each message is one line: which file or layer, what was expected, what to do. The command line prints it without a
traceback and returns the error's exit code.
"""

import errno
import os
import re

from kl_lens.base.system import WINDOWS


class KLLensError(Exception):
    """Base class: the input is wrong, not the program."""

    exit_code = 1


class CheckpointError(KLLensError):
    """A model that cannot be found, read or understood."""


class TextError(KLLensError):
    """A text source that cannot be read, is too short, or overlaps another split."""


class FormatError(KLLensError):
    """A weight that a format cannot hold, or an unknown format."""


class UnlearntError(FormatError):
    """A recipe that needs statistics, and there are none."""


class RunError(KLLensError):
    """A run folder that does not fit the command."""


class PlanError(KLLensError):
    """A plan that cannot be made or read."""


class BudgetError(PlanError):
    """A budget that no plan can meet; the message gives the possible range."""

    exit_code = 2


class TargetError(KLLensError):
    """A model, plan, file or device that a target (OpenVINO, GGUF) cannot serve."""


class UnsupportedError(TargetError):
    """The runtime does not support this architecture or tokenizer."""


# What the user can do about an error of the system.
_WHAT_TO_DO = {
    errno.ENOSPC: "free some space and run the command again; finished work is kept",
    errno.EDQUOT: "free some space and run the command again; finished work is kept",
    errno.EACCES: "change its permissions, or use another place",
    errno.EPERM: "change its permissions, or use another place",
    errno.EROFS: "use another place",
    errno.ENOENT: "give one that exists",
    errno.ENOTDIR: "there is a file where a folder is needed; use another place",
    errno.EISDIR: "there is a folder where a file is needed; use another place",
    errno.EEXIST: "there is a file where a folder is needed; use another place",
    errno.ENOTEMPTY: "another process may be writing there; use another place",
    errno.ENAMETOOLONG: "give a shorter one",
    errno.ELOOP: "a link there points back to itself",
    errno.EIO: "the disk does not respond; use another place",
    errno.EMFILE: "raise the limit (ulimit -n) and run the command again",
    errno.ENFILE: "close other programs and run the command again",
    errno.EFBIG: "the disk or a limit (ulimit -f) takes no file of this size; use another disk",
}
LONGEST_PATH = 248  # characters on Windows, of a folder; of a file 260
# As Rust spells an error of the system, and numpy a file that it could not write whole.
_IN_RUST = re.compile(r"(?:os error |Os { code: )(\d+)")
_FULL = re.compile("written|free space")


def system_error(error: BaseException) -> OSError | None:
    """The system's error that a library met, if it says which."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = None
    if spelled := _IN_RUST.search(str(error)):
        number = int(spelled[1])
    elif isinstance(error, OSError) and _FULL.search(str(error)):
        return OSError(errno.ENOSPC, "no space left, or a limit on a file's size")
    return None if number is None else OSError(number, os.strerror(number))


def system_reason(error: OSError) -> str | None:
    """The system's error in one line: which file, why, what to do. None if we have no advice."""
    what_to_do = _WHAT_TO_DO.get(error.errno or 0)
    path = "" if error.filename is None else os.fsdecode(error.filename)
    if WINDOWS and len(path) >= LONGEST_PATH:
        what_to_do = "Windows takes no path longer than 260 characters; use a shorter --run or --out"
    elif WINDOWS and error.errno == errno.EACCES:
        what_to_do = "close the program that has it open, or use another place"
    if what_to_do is None:
        return None
    return f"{path}{': ' * bool(path)}{error.strerror}; {what_to_do}"


def printable(text: str, kept: str = "") -> str:
    """Escapes control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def one_line(error: BaseException, most: int = 240) -> str:
    """Another library's error as one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "…"


def last_line(error: BaseException) -> str:
    """The last line, for libraries that put the reason there."""
    return (
        [line.strip() for line in str(error).splitlines() if line.strip()]
        or [type(error).__name__]
    )[-1]
