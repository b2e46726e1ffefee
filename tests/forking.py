"""A warm process that forks: hundreds of real commands, ended by hundreds of real signals, without hundreds of starts.

python -m tests.forking MODULE …: loads the modules, then answers requests, a line of JSON each. A request is served
by a fork, which may abort, hang or be killed without harming the others.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pytest

# What Python does to files, seen before it happens; what SQLite and other C code do has no events.
EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "shutil.rmtree",
    "sqlite3.connect",
)


@dataclass(frozen=True)
class Ended:
    """How a fork ended, and what it said."""

    code: int  # as of subprocess: negative for a signal
    said: str
    seconds: float
    peak: int  # bytes of memory


class Forks:
    """`with Forks("kl_lens.cli.main") as forks: forks.call("kl_lens.cli.main:main", [["inspect", "x"]])`."""

    def __init__(self, *modules: str) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            pytest.skip("needs processes that fork safely, as on Linux")
        command = [sys.executable, "-m", __name__, *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")

    def call(
        self,
        function: str,
        arguments: Sequence[Any],
        *,
        kill_after: float = 600,
        kill_before: int | None = None,
        folder: Path | None = None,
    ) -> Ended:
        """Killed after so many seconds, or `kill_before` the n-th thing that Python does to a file of `folder`."""
        request = {
            "function": function,
            "arguments": list(arguments),
            "kill_after": kill_after,
            "kill_before": kill_before,
            "folder": str(folder),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _be_the_command(request: dict[str, Any], writing: int) -> None:
    code: object = 99
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        if request["kill_before"] is not None:
            _end_before(request["kill_before"], request["folder"])
        module, _, name = request["function"].partition(":")
        code = getattr(importlib.import_module(module), name)(*request["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _end_before(moment: int, folder: str) -> None:
    remaining = [moment]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(
            str(argument).startswith(folder) for argument in arguments
        ):
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1

    sys.addaudithook(hook)


def _watched(child: int, reading: int, seconds: float) -> Ended:
    """Reads what the fork says until it ends, or kills it when its time has come."""
    begin = time.monotonic()
    output = b""
    killed = False
    while True:
        deadline = begin + seconds + 600 * killed
        ready, _, _ = select.select(
            [reading], [], [], max(0.0, deadline - time.monotonic())
        )
        part = os.read(reading, 65536) if ready else b""
        if ready and part:
            output = (output + part)[-20_000:]
        elif ready or killed:  # killed: a child of the fork still has its output
            break
        else:
            os.kill(child, signal.SIGKILL)
            killed = True
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    words = output.decode(errors="replace")
    return Ended(code, words, time.monotonic() - begin, usage.ru_maxrss * 1024)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            answers.close()
            _be_the_command(request, writing)
        os.close(writing)
        answers.write(
            json.dumps(asdict(_watched(child, reading, request["kill_after"]))) + "\n"
        )
        answers.flush()


if __name__ == "__main__":
    main()
