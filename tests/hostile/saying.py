"""What every verb owes its user, whatever it is given: it works, or says in one line why not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kl_lens.cli.last_net import EXIT_CODE
from kl_lens.cli.main import main

TOLD: Counter[str] = Counter()  # how commands ended, for the summary


def says_one_line(words: Sequence[str], capsys: Any, *, may_succeed: bool = False) -> str:
    """Runs a command that is to fail; the line it says. Notes and warnings may stand before it."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out, (words, printed.err)
    if may_succeed and code == 0:
        TOLD["worked"] += 1
        return ""
    assert code not in (0, None), (words, printed)
    assert isinstance(code, int)
    assert 0 < code < 128, (words, code)
    last = printed.err.rstrip("\n").split("\n")[-1]
    assert last.startswith("kl-lens"), (words, printed.err)
    assert last.isprintable(), last
    TOLD["unexpected, one line" if code == EXIT_CODE else "one clear line"] += 1
    if code == EXIT_CODE and "KL_LENS_SHOW" in os.environ:
        with open(os.environ["KL_LENS_SHOW"], "a") as seen:
            seen.write(f"{words} {last}\n")
    return last
