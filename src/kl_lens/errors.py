"""Errors that a user can act on.

Each message is one line: which file or layer, what was expected, what to do. The command line prints it
without a traceback and ends with the error's exit code.
"""


class KLLensError(Exception):
    """Base of all errors that are the input's fault, not the program's."""

    exit_code = 1


class CheckpointError(KLLensError):
    """A model that cannot be found, read or understood."""


class TextError(KLLensError):
    """A text source that cannot be read, is too short, or overlaps another split."""


class FormatError(KLLensError):
    """A weight that a format cannot hold, or a format name nobody registered."""


class UnlearntError(FormatError):
    """A recipe that learns from text, where no statistics are at hand."""


class RunError(KLLensError):
    """A run folder that does not fit what is asked of it."""


class PlanError(KLLensError):
    """A plan that cannot be made or read."""


class BudgetError(PlanError):
    """A budget that nothing can meet; the message holds the achievable range."""

    exit_code = 2


class TargetError(KLLensError):
    """A model, plan, file or device that a target (OpenVINO, GGUF) cannot serve."""


class UnsupportedError(TargetError):
    """A runtime that does not have this architecture or tokenizer at all: nobody's mistake."""


def one_line(error: BaseException, most: int = 240) -> str:
    """What another library's error says, in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "…"


def last_line(error: BaseException) -> str:
    """The same of a library that tells where it was first, and what is wrong in the end."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
