"""What every verb owes its user, whatever it is given: it works, or says in one line why not."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kl_lens.base.system import peak_memory
from kl_lens.cli.main import UNEXPECTED, main

MOST_MEMORY = 2 << 30  # that a command on hostile input may take


def cases(few: int, all_cases: int) -> Callable[[Any], Any]:
    """For a fuzzer: few cases in `./test`, many in `./test --all`, where they are 10,000 together."""
    return pytest.mark.parametrize(
        "cases", [few, pytest.param(all_cases, marks=pytest.mark.slow)]
    )


def says_one_line(words: Sequence[str], capsys: Any, *, may_succeed: bool = False) -> str:
    """Runs a command that is to fail; the line it says. Notes and warnings may stand before it."""
    capsys.readouterr()
    before = _peak_from_now()
    try:
        code: object = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    printed = capsys.readouterr()
    assert peak_memory() - before < MOST_MEMORY, words
    assert "Traceback" not in printed.err + printed.out, (words, printed.err)
    if may_succeed and code == 0:
        return ""
    assert code not in (0, None), (words, printed)
    assert isinstance(code, int)
    assert 0 < code < 128, (words, code)
    last = printed.err.rstrip("\n").split("\n")[-1]
    assert last.startswith("kl-lens"), (words, printed.err)
    assert last.isprintable(), last
    assert code != UNEXPECTED, (words, last)
    return last


@contextmanager
def within_time(seconds: int, about: object) -> Iterator[None]:
    """A hang is a failure that says what hung; Windows has no such alarm."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise AssertionError(f"a hang: {about}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _peak_from_now() -> int:
    """Makes Linux forget the most memory that this process ever had; the most since then."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()
