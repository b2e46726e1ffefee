"""A warm process that forks: hundreds of real commands, ended by hundreds of real signals, without hundreds of starts.

python -m tests.forking MODULE …: loads the modules, then answers requests, a line of JSON each. A request is served
by a fork, which may abort, hang or be killed without harming the others.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate("")

    def call(
        self,
        function: str,
        arguments: Sequence[Any],
        *,
        kill_after: float | None = None,
        kill_before: int | None = None,
        ctrl_c_after: float | None = None,
        folder: Path | None = None,
        limit: float = 600,
    ) -> Ended:
        """`kill_after` seconds, or `kill_before` the n-th thing that Python does to a file of `folder`.

        `ctrl_c_after` seconds after the first words, SIGINT for the fork and its children, as a terminal sends it.
        """
        request = {
            "function": function, "arguments": list(arguments), "kill_after": kill_after, "kill_before": kill_before,
            "ctrl_c_after": ctrl_c_after, "folder": str(folder), "limit": limit,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _serve(request: dict[str, Any], answers: Any) -> None:
    reading, writing = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_the_command(request, writing, answers)
    os.close(writing)
    answers.write(json.dumps(asdict(_watched(child, reading, begin, request))) + "\n")
    answers.flush()


def _be_the_command(request: dict[str, Any], writing: int, answers: Any) -> None:
    code: object = 99
    try:
        answers.close()
        os.setpgid(0, 0)
        # Who started the tests may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    left = [moment]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(str(each).startswith(folder) for each in arguments):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(hook)


def _watched(child: int, reading: int, begin: float, request: dict[str, Any]) -> Ended:
    """Reads what the fork says until it ends, or kills it when its time has come."""
    import select

    ctrl_c, kill = request["ctrl_c_after"], request["kill_after"]
    deadline = begin + (request["limit"] if kill is None else kill)
    said, signals = b"", [signal.SIGKILL] if ctrl_c is None else [signal.SIGINT, signal.SIGKILL]
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            part = os.read(reading, 65536)
            if not said and ctrl_c is not None:
                deadline = time.monotonic() + ctrl_c
            said = (said + part)[-20_000:]
            if not part:
                break
        elif signals:
            number = signals.pop(0)
            (os.killpg if number == signal.SIGINT else os.kill)(child, number)
            deadline = time.monotonic() + 600
        else:
            break  # a child of the fork still has its output
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - begin
    return Ended(
        os.waitstatus_to_exitcode(status), said.decode(errors="replace"), seconds, usage.ru_maxrss * 1024
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        _serve(json.loads(line), answers)


if __name__ == "__main__":
    main()
