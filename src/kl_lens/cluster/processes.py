"""Workers as processes on this machine, each with a share of its cores. No Ray needed.

Driver and worker are connected by a pipe. If the driver dies, the worker reads the end of the pipe and exits at once. A
worker listens before it loads torch, so this module imports little.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from kl_lens.environment import THREAD_VARIABLES, available_memory, for_child, processors
from kl_lens.errors import KLLensError
from kl_lens.units import human_bytes

if TYPE_CHECKING:
    from kl_lens.cluster.worker import Order

MANY_CORES = 8  # on fewer, one process keeps all of them busy
LEAST_WORKERS = 4
# Operations per core below which starting workers costs more than it saves: on 16 cores a quarter of this took one
# process 15.9 s, of which workers saved a third, and starting them took 17 s.
LEAST_OPERATIONS = 1.5e12
# Memory of a process before it opens a model: Python, torch, transformers, compiled kernels.
PROCESS_BYTES = 600 * 10**6
_MOST = 4  # workers per processor; more would only wait for each other


def workers_by_default(cores: int, copy_bytes: int, budget: int, free: int, operations: float) -> int:
    """The default number of processes for a sweep on a CPU; 1: only this one, with all threads.

    Products of a small model are too small for many cores, but candidates are independent. So the default is workers
    with two threads each: on 16 cores they were as fast as twice as many with one thread, at half the memory and
    starting time. If so many copies (weights, and the states of a batch) do not fit into the memory budget and free
    memory, half as many with twice the threads, and so on.
    """
    if cores < MANY_CORES or operations < cores * LEAST_OPERATIONS:
        return 1
    counts = [cores >> step for step in range(1, cores.bit_length())]
    fitting = (n for n in counts if n * copy_bytes <= budget and n * (copy_bytes + PROCESS_BYTES) <= free)
    return next((n for n in fitting if n >= LEAST_WORKERS), 1)


def threads_here() -> int:
    """The threads torch uses: one per core of this process, or OMP_NUM_THREADS."""
    import torch

    return min(processors(), torch.get_num_threads())


class ProcessHands:
    """One process per worker: a `WorkerPool`."""

    flag = "--workers"

    def __init__(self, copy_bytes: int = 0, threads: int | None = None) -> None:
        """`copy_bytes`: size of one worker's model; `threads`: per worker (default: an equal share)."""
        self._copy, self._threads = copy_bytes + PROCESS_BYTES, threads
        self._there: set[_Process] = set()

    def open(self, order: Order, workers: int | None) -> tuple[Order, int]:
        cores, count = processors(), workers or 1
        if count > _MOST * cores:
            raise KLLensError(
                f"{self.flag} {count}: this machine has {cores} processors; use at most {_MOST * cores}"
            )
        if count * self._copy > (free := available_memory()):
            raise KLLensError(
                f"{self.flag} {count}: this many copies of the model need {human_bytes(count * self._copy)}, but "
                f"{human_bytes(free)} are free; use at most {max(1, free // self._copy)}"
            )
        threads = self._threads or max(1, threads_here() // count)
        return replace(order, threads=threads, sharers=count), count

    def close(self) -> None:
        for process in list(self._there):
            self.dismiss(process)

    def hire(self, order: Order) -> _Process:
        process = _Process(order)
        self._there.add(process)
        return process

    def call(self, worker: _Process, method: str, *arguments: object) -> _Process:
        worker.send((method, arguments))
        return worker

    def wait(self, calls: Sequence[_Process], seconds: float) -> _Process | None:
        ready = wait([process.pipe for process in calls], seconds)
        return next((process for process in calls if process.pipe in ready), None)

    def answer(self, call: _Process) -> Any:
        from kl_lens.cluster.crew import Lost

        try:
            return call.pipe.recv()
        except (EOFError, OSError):
            raise Lost(call.reason()) from None

    def dismiss(self, worker: _Process) -> None:
        self._there.discard(worker)
        worker.end()


class _Process:
    """A worker's process and our end of its pipe."""

    def __init__(self, order: Order) -> None:
        self.pipe, theirs = Pipe()
        # What libraries print; its last line may explain a crash.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        environment = for_child() | {f"{name}_NUM_THREADS": str(order.threads) for name in THREAD_VARIABLES}
        with theirs:
            # Its own session, so that Ctrl-C reaches only the driver.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        self.send(order)

    def send(self, message: object) -> None:
        with suppress(OSError):  # dead: `answer` reads the end of the pipe
            self.pipe.send(message)

    def reason(self) -> str:
        """Why it died."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "it was killed (SIGKILL), probably because memory ran out"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 10_000))
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else f"it ended with code {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        self._said.close()


def serve(pipe: Connection) -> None:
    """Runs a worker: receives its order, then answers calls one by one."""
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    from kl_lens.cluster.worker import Worker

    worker = Worker(pickle.loads(calls.get()))
    while True:
        method, arguments = pickle.loads(calls.get())
        pipe.send(getattr(worker, method)(*arguments))


def _listen(pipe: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
