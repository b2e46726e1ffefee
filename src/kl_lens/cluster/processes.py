"""Workers that are processes on this machine, each with a share of its cores: no Ray needed.

Driver and worker are the two ends of a pipe and nothing else. A worker whose driver is gone reads the end of the pipe
and ends at once, whatever it computes, so nothing is left however the driver ended. Light on purpose: a worker listens
before it loads torch.
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

from kl_lens.environment import available_memory, for_child, processors
from kl_lens.errors import KLLensError
from kl_lens.units import human_bytes

if TYPE_CHECKING:
    from kl_lens.cluster.worker import Order

MANY_CORES = 8  # on fewer, one process has work enough for all of them
LEAST_WORKERS = 4
# A sweep has to have so many operations for each core, or starting costs more than is gained: on 16 cores a quarter of
# them took one process 15.9 s, of which workers spared a third, and starting them took 17 s.
LEAST_OPERATIONS = 1.5e12
# What a process has in memory before it opens a model: Python, torch, transformers, compiled kernels.
PROCESS_BYTES = 600 * 10**6
_MOST = 4  # workers for every processor; more would only wait for each other
# …_NUM_THREADS, of libraries that read it when they are loaded
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")


def workers_by_default(cores: int, copy_bytes: int, budget: int, free: int, operations: float) -> int:
    """How many processes a sweep on a CPU gets where nobody says; 1: this one alone, with all threads.

    Products of a small model are too small for many cores, but candidates do not need each other. So: workers of two
    threads each, which on 16 cores were as fast as twice as many of one thread, for half the memory and half the
    starting; where so many copies (weights, and the states of a batch) do not fit into the memory budget and into what
    is free, half as many of twice the threads, and so on.
    """
    if cores < MANY_CORES or operations < cores * LEAST_OPERATIONS:
        return 1
    counts = [cores >> step for step in range(1, cores.bit_length())]
    fitting = (n for n in counts if n * copy_bytes <= budget and n * (copy_bytes + PROCESS_BYTES) <= free)
    return next((n for n in fitting if n >= LEAST_WORKERS), 1)


def threads_here() -> int:
    """Those that torch computes with: one for every core that this process may use, or what OMP_NUM_THREADS says."""
    import torch

    return min(processors(), torch.get_num_threads())


class ProcessHands:
    """One process for every worker: `WorkerPool` of a crew."""

    flag = "--workers"

    def __init__(self, copy_bytes: int = 0, threads: int | None = None) -> None:
        """`copy_bytes`: of one worker's model; `threads`: of each worker, if not its share of this process's."""
        self._copy, self._threads = copy_bytes + PROCESS_BYTES, threads
        self._there: set[_Process] = set()

    def open(self, order: Order, workers: int | None) -> tuple[Order, int]:
        cores, count = processors(), workers or 1
        if count > _MOST * cores:
            raise KLLensError(
                f"{self.flag} {count}: {cores} processors are here; ask for {_MOST * cores} at the most"
            )
        if count * self._copy > (free := available_memory()):
            raise KLLensError(
                f"{self.flag} {count}: so many copies of the model take {human_bytes(count * self._copy)}, and "
                f"{human_bytes(free)} are free; ask for {max(1, free // self._copy)} at the most"
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
    """A worker's process, and this end of its pipe."""

    def __init__(self, order: Order) -> None:
        self.pipe, theirs = Pipe()
        # Nameless: what libraries print there, of which one line may be told.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        environment = for_child() | {f"{name}_NUM_THREADS": str(order.threads) for name in _THREADS}
        with theirs:
            # A session of its own: Ctrl-C is the driver's, and the end of the pipe is the worker's.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
                pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
            )  # fmt: skip
        self.send(order)

    def send(self, message: object) -> None:
        with suppress(OSError):  # gone: whoever waits for its answer reads the end of the pipe
            self.pipe.send(message)

    def reason(self) -> str:
        """Why it is gone."""
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "it was killed (SIGKILL), as the system does when memory is short"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 10_000))
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else f"it ended with {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        self._said.close()


def serve(pipe: Connection) -> None:
    """A worker's life: an order, then calls of its methods, one after the other, each with an answer."""
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
        os._exit(0)  # nobody is there to take a result


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
