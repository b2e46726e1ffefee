"""Workers on a Ray cluster: the GPUs of one machine, or many machines."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kl_lens.cluster.crew import Lost
from kl_lens.cluster.worker import Failed, Order, Worker
from kl_lens.environment import processors
from kl_lens.errors import KLLensError, one_line

LOCAL = "local"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default niceness of 15 leaves workers almost no time if anything else runs.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would print a paragraph; we print one line.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
}


@dataclass
class RayPool:
    """One Ray actor per worker: a `WorkerPool`."""

    address: str
    gpus_per_worker: float | None = None

    @property
    def flag(self) -> str:
        return f"--ray {self.address}"

    def open(self, order: Order, workers: int | None) -> tuple[Order, int]:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError:
            raise KLLensError("--ray needs Ray; install it with: pip install 'kl-lens[ray]'") from None
        self._ray = ray
        try:
            return self._connect(order, workers)
        except BaseException:
            ray.shutdown()
            raise

    def close(self) -> None:
        self._ray.shutdown()  # this also ends the actors

    def _connect(self, order: Order, workers: int | None) -> tuple[Order, int]:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if self.address == LOCAL:
                cpus = max(processors(), workers or 1)
                self._ray.init(address=LOCAL, num_cpus=cpus, include_dashboard=False, **quiet)
            else:
                require_reachable(self.address)
                self._ray.init(address=self.address, **quiet)
        except KLLensError:
            raise
        except SystemExit:  # Ray ends the process if a cluster does not answer
            raise KLLensError(f"{self.flag}: no Ray cluster answers there") from None
        except Exception as error:  # Ray raises many kinds, even plain Exception
            raise KLLensError(f"{self.flag}: {one_line(error)}") from None
        there = self._ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), there.get("GPU", 0.0)
        wanted = str(order.how.get("device", "cpu"))
        on_gpu = wanted.startswith("cuda") or (wanted == "auto" and gpus >= 1)
        each = self.gpus_per_worker if self.gpus_per_worker is not None else float(on_gpu)
        nodes = [int(n["Resources"].get("CPU", 0)) for n in self._ray.nodes() if n["Alive"]]
        count = workers or (int(gpus / each) if each else len(nodes)) or 1
        if count > cpus or each * count > gpus:
            raise KLLensError(
                f"{self.flag}: {count} workers need a CPU and {each:g} GPUs each; there are {cpus} CPUs and "
                f"{gpus:g} GPUs; use fewer --workers"
            )
        # As many threads as possible with each worker inside one machine.
        fitting = (t for t in range(cpus // count, 1, -1) if sum(cpu // t for cpu in nodes) >= count)
        return replace(order, threads=next(fitting, 1), gpus=each), count

    def hire(self, order: Order) -> Any:
        options = {"num_cpus": order.threads, "num_gpus": order.gpus, "max_restarts": 0}
        return self._ray.remote(Worker).options(**options, scheduling_strategy="SPREAD").remote(order)

    def call(self, worker: Any, method: str, *arguments: object) -> Any:
        return getattr(worker, method).remote(*arguments)

    def wait(self, calls: Sequence[Any], seconds: float) -> Any | None:
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=seconds)
        return ready[0] if ready else None

    def answer(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayActorError as error:
            raise Lost(_why(error)) from None
        except self._ray.exceptions.RayError as error:
            return Failed(one_line(error))

    def dismiss(self, worker: Any) -> None:
        self._ray.kill(worker)


def _why(error: Exception) -> str:
    """The sentence of Ray's message that gives the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "dead because" in line]
    return one_line(ValueError((telling or lines or ["no reason given"])[-1]))


def require_reachable(address: str, seconds: float = 10.0) -> None:
    """Checks the connection first: Ray itself tries for minutes."""
    place = address.removeprefix("ray://")
    host, colon, port = place.rpartition(":")
    if place == "auto":
        return
    if not colon or not port.isdigit():
        raise KLLensError(f"--ray {address}: give HOST:PORT of the cluster's head, auto, or {LOCAL}")
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise KLLensError(
            f"--ray {address}: cannot be reached ({one_line(error)}); is the head running (ray start --head)?"
        ) from None
