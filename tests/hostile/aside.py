"""The quarantine of the targets, served by forks of a warm process: real runtimes, real aborts, a tenth of the time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.targets import open_session, quarantine
from tests.forking import Forks
from tests.hostile.saying import MOST_MEMORY


def look(words: list[str]) -> int:
    """What a fork does."""
    quarantine.sys.argv[1:] = words
    return quarantine.main()


@contextmanager
def forked_quarantine(*modules: str) -> Iterator[None]:
    """Within, a file that is tried out aside is so by a fork that has the libraries already."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(
            "GGML_NO_BACKTRACE", "1"
        )  # as the quarantine does: else it spends seconds in a debugger
        forks = stack.enter_context(Forks("tests.hostile.aside", *modules))

        def watched(words: list[str], *_: object) -> tuple[int, bytes]:
            ended = forks.call("tests.hostile.aside:look", [words])
            assert ended.peak < MOST_MEMORY
            if ended.code == -9:
                raise TimeoutError
            return ended.code, ended.said.encode()

        patch.setattr(quarantine, "_watched", watched)
        yield


def opens(path: Any) -> None:
    """Opens a file in this process, as evaluation would; a clear error about it is as good."""
    message = None
    try:
        session = open_session(path, threads=1)
        session.logits([0, 1])
        session.close()
    except KLLensError as error:
        message = str(error)
    assert message is None or "\n" not in message
