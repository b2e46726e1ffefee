"""One sweep, several processes: shares by hand or by a queue, and workers, on this machine or kept by Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kl_lens.checkpoints import LoadedModel, own_images
from kl_lens.checkpoints.residency import BLOCKS_AT_ONCE
from kl_lens.environment import available_memory
from kl_lens.errors import KLLensError
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import COUNT, Loading, Settings, grouped, number
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, FastEngine
from kl_lens.sensitivity.input_major import gains_by_input_major
from kl_lens.sensitivity.sweep import Crew
from kl_lens.sensitivity.teacher import window_bytes

SLURM = "slurm"
L = TypeVar("L", bound=Loading)
several = grouped("several processes")


@dataclass(frozen=True, kw_only=True)
class Workers(Settings):
    """Who measures: this process, others on this machine, or workers that Ray keeps."""

    ray: str | None = several(
        None,
        "a Ray cluster's HOST:PORT, or local: workers on this machine (needs kl-lens[ray])",
        metavar="ADDRESS",
    )
    workers: int | None = several(
        None,
        "so many processes side by side, on this machine unless --ray says where (default: on 8 cores and more, where "
        "that pays; of Ray one for every GPU, or where there are none for every machine); 1: this process alone",
        kind=COUNT,
    )
    gpus_per_worker: float | None = several(
        None,
        "of a cluster (default: 1 where workers compute on GPUs; 0.5: two share one)",
        kind=number(64, of=float),
        metavar="G",
    )

    @property
    def worker_settings(self) -> dict[str, Any]:
        """These settings alone, to hand on to another verb's."""
        return {name: getattr(self, name) for name in ("ray", "workers", "gpus_per_worker")}


def here(settings: L) -> L:
    """How this process opens the model: where workers compute, it only looks at it."""
    return replace(settings, device="cpu") if getattr(settings, "ray", None) else settings


def crew_for(
    settings: Any,
    place: str,
    model: LoadedModel,
    run: Path,
    events: Events,
    target: str | None = None,
    operations: float = 0.0,
) -> AbstractContextManager[Crew | None]:
    """Who does a sweep in this process's place, if anybody: workers of --ray, or on this machine.

    Args:
        place: opens the model there as here.
        target: as deployed there.
        operations: that are left to do; for nothing no process is started.
    """
    budget = getattr(settings, "memory_budget", DEFAULT_MEMORY)
    count = settings.workers
    if settings.ray is None:
        count = workers_here(settings, model, operations)
        if count == 1 or not operations:
            return nullcontext()
        if model.chain.device.type != "cpu":
            raise KLLensError(
                f"--workers {count} on {model.chain.device}: workers on GPUs are Ray's; add --ray local or --device cpu"
            )
        if settings.workers is None:
            events.note(f"{count} processes side by side; --workers 1: this one alone")
    from kl_lens.cluster.crew import HiredCrew
    from kl_lens.cluster.processes import ProcessHands
    from kl_lens.cluster.ray_pool import RayPool
    from kl_lens.cluster.worker import Order

    how = dict(settings.how) | {"images": _absolute(settings.images or own_images(place))}
    if settings.ray is None:  # here the choice is made
        how["device"] = model.chain.device.type
    if where := getattr(settings, "weights", None):  # each worker finds out whether they fit into its memory
        how |= {"weights": where, "memory_budget": None if budget == DEFAULT_MEMORY else budget}
    order = Order(
        model=_absolute(place) or place,
        how=how,
        fingerprint=model.fingerprint,
        engine=getattr(settings, "engine", FastEngine.name),
        memory_budget=budget,
        target=target,
        run=run.absolute(),
    )
    hands = RayPool(settings.ray, settings.gpus_per_worker) if settings.ray else ProcessHands(_weights(model))
    return HiredCrew(hands, order, count, events.note)


def workers_here(settings: Any, model: LoadedModel, operations: float) -> int:
    """Processes of this machine for so much work: --workers, or `workers_by_default`."""
    from kl_lens.cluster.processes import threads_here, workers_by_default

    chain = model.chain
    if settings.workers or model.residency is not None or chain.device.type != "cpu":
        return settings.workers or 1
    vocabulary, width = (int(n) for n in chain.head.weight.shape)  # type: ignore[union-attr]
    copy = _weights(model) * (2 if gains_by_input_major(chain.device) else 1)
    copy += window_bytes(chain, chain.task.rows_at_once, width, vocabulary)
    budget = getattr(settings, "memory_budget", DEFAULT_MEMORY)
    return workers_by_default(threads_here(), copy, budget, available_memory(), operations)


def _weights(model: LoadedModel) -> int:
    """Bytes in memory."""
    if (there := model.residency) is not None:
        return there.resident_bytes + BLOCKS_AT_ONCE * there.block_bytes
    return sum(p.nbytes for p in model.model.parameters())


def _absolute(place: str | None) -> str | None:
    """A folder as workers find it, wherever they stand; names stay as they are."""
    expanded = os.path.expanduser(place or "")
    return os.path.abspath(expanded) if os.path.exists(expanded) else place


def share_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`3/16` → the third of sixteen; `slurm` → what the variables of a Slurm array say."""
    if text == SLURM:
        return _slurm(environment)
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise KLLensError(f"--shard {text}: write 3/16 for the third of sixteen, or {SLURM} in a job array")
    return index, count


def _slurm(environment: Mapping[str, str]) -> tuple[int, int]:
    def number(name: str, default: int | None = None) -> int:
        text = environment.get(f"SLURM_ARRAY_TASK_{name}", "" if default is None else str(default))
        if not re.fullmatch(r"\d{1,9}", text):
            raise KLLensError(
                f"--shard {SLURM}: SLURM_ARRAY_TASK_{name} is {text or 'not set'}; submit a job array "
                "(sbatch --array=1-16), or write --shard 3/16"
            )
        return int(text)

    place, count = number("ID"), number("COUNT")
    first, step = number("MIN", 1), max(1, number("STEP", 1))
    index, off = divmod(place - first, step)
    if off or not 0 <= index < count:
        raise KLLensError(
            f"--shard {SLURM}: task {place} is none of {count} that begin at {first} in steps of {step}; "
            "give the array as one range (sbatch --array=1-16)"
        )
    return index + 1, count


def shard_name(index: int, count: int) -> str:
    """Folders in the order of their numbers."""
    return f"{index:0{len(str(count))}}-of-{count}"
