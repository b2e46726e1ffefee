"""Processes of their own, for work in Python that would hold up this one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from threading import Thread
from types import ModuleType
from typing import Any

from kl_lens.base.environment import THREAD_VARIABLES
from kl_lens.base.system import LINUX, WINDOWS


@dataclass(frozen=True, eq=False)
class Aside:
    """Does one thing after another."""

    submit: Callable[..., Future[Any]]  # a function of a module, and its arguments
    end: Callable[[], None]


def aside(
    threads: int, begin: Callable[..., object], *arguments: object, several: bool = False
) -> Aside:
    """Starts a process pool of one process: if it dies, it takes no other's work along. First it calls `begin`."""
    # For several, a server imports torch and the rest once and forks, on Linux. A single one does not wait for that.
    context = get_context("forkserver" if several and LINUX else "spawn")
    context.set_forkserver_preload([begin.__module__])
    with _starting(threads):
        before = active_children()
        pool = ProcessPoolExecutor(
            1, context, partial(_become, dict(os.environ), begin, *arguments)
        )
        pool.submit(int)
        processes = [child for child in active_children() if child not in before]

    def end() -> None:
        for process in processes:
            process.kill()
        pool.shutdown()

    return Aside(pool.submit, end)


@contextmanager
def _starting(threads: int) -> Iterator[None]:
    """What a process inherits that starts within: the number of threads of its libraries; Ctrl-C, which only the parent
    answers; and no script of the user's, which it would run again."""
    environment = dict(os.environ)
    main = sys.modules["__main__"]
    if not WINDOWS:  # there a process begins to ignore Ctrl-C when it runs
        resource_tracker.ensure_running()  # it would unblock Ctrl-C
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        os.environ |= {f"{name}_NUM_THREADS": str(threads) for name in THREAD_VARIABLES}
        # Such as warnings of locks that a killed process did not give back.
        os.environ["PYTHONWARNINGS"] = "ignore"
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ |= environment
        if not WINDOWS:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become(
    environment: Mapping[str, str], begin: Callable[..., object], *arguments: object
) -> None:
    """It shows nothing and ends with the process that started it."""
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "wb") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)

    def end_with_parent() -> None:
        parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()
    begin(*arguments)
