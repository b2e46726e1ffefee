"""One sweep in several processes: shards, or workers on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

from kl_lens.base.environment import available_memory
from kl_lens.base.errors import KLLensError
from kl_lens.measuring.engines import DEFAULT_MEMORY
from kl_lens.measuring.products import gains_by_input_major
from kl_lens.measuring.teacher import window_bytes
from kl_lens.measuring.workers import Order, Workers, hired, threads_here, workers_by_default
from kl_lens.model import LoadedModel, own_images
from kl_lens.model.residency import BLOCKS_AT_ONCE
from kl_lens.study.events import Events
from kl_lens.study.settings import Opening, Processes

SLURM = "slurm"


def workers_for(
    processes: Processes,
    model: LoadedModel,
    *,
    opening: Opening,
    weights: str,
    events: Events,
    operations: float,
    name: str | None = None,
    memory_budget: int = DEFAULT_MEMORY,
) -> AbstractContextManager[Workers | None]:
    """The workers for a sweep, or None to measure in this process.

    Args:
        opening, weights, name: how they open the model (default name: where it came from).
        operations: work left to do; with none, no process is started.
    """
    if (there := model.residency) is not None:
        copy = there.resident_bytes + BLOCKS_AT_ONCE * there.block_bytes
    else:
        copy = sum(p.nbytes for p in model.model.parameters())
    count, device = processes.workers, model.chain.device
    if processes.ray is None:
        count = count or _by_default(model, copy, memory_budget, operations)
        if count == 1 or not operations:
            return nullcontext()
        if device.type != "cpu":
            raise KLLensError(
                f"--workers {count} on {device}: GPU workers need Ray; add --ray local or --device cpu"
            )
        if processes.workers is None:
            events.note(f"measuring with {count} processes; --workers 1 uses only this one")
        opening = replace(opening, device=device.type)  # `auto` is decided here
    place = name or model.source or model.name
    images = _absolute(opening.images or own_images(place) or "") or None
    # Each worker checks whether the weights fit into its memory.
    room = None if memory_budget == DEFAULT_MEMORY else memory_budget
    how = asdict(replace(opening, images=images))
    how |= {"task": "image" if images else None, "weights": weights, "memory_budget": room}
    order = Order(_absolute(place), how, model.fingerprint)
    return hired(order, count, processes.ray, processes.gpus_per_worker, copy, events.note)


def _by_default(model: LoadedModel, weights: int, budget: int, operations: float) -> int:
    chain = model.chain
    if model.residency is not None or chain.device.type != "cpu":
        return 1
    vocabulary, width = (int(n) for n in chain.head.weight.shape)  # type: ignore[union-attr]
    copy = weights * (2 if gains_by_input_major(chain.device) else 1)
    copy += window_bytes(chain, chain.task.rows_at_once, width, vocabulary)
    return workers_by_default(threads_here(), copy, budget, available_memory(), operations)


def _absolute(place: str) -> str:
    """An absolute path if the place exists; other names are unchanged."""
    expanded = os.path.expanduser(place)
    return os.path.abspath(expanded) if os.path.exists(expanded) else place


def share_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`3/16` → (3, 16); `slurm` → from the variables of a Slurm job array."""
    if text != SLURM:
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(text))
        index, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= index <= count:
            raise KLLensError(
                f"--shard {text}: write 3/16 for the third of sixteen, or {SLURM} in a job array"
            )
        return index, count
    given = {
        name: environment.get(f"SLURM_ARRAY_TASK_{name}", default)
        for name, default in {"ID": "", "COUNT": "", "MIN": "1", "STEP": "1"}.items()
    }
    for name, value in given.items():
        if not re.fullmatch(r"\d{1,9}", value):
            raise KLLensError(
                f"--shard {SLURM}: SLURM_ARRAY_TASK_{name} is {value or 'not set'}; submit a job array "
                "(sbatch --array=1-16), or write --shard 3/16"
            )
    place, count, first, step = (int(value) for value in given.values())
    index, off = divmod(place - first, max(1, step))
    if off or not 0 <= index < count:
        raise KLLensError(
            f"--shard {SLURM}: task {place} does not belong to {count} tasks from {first} in steps of {step}; "
            "give the array as one range (sbatch --array=1-16)"
        )
    return index + 1, count


def shard_name(index: int, count: int) -> str:
    """Zero-padded, so that folders sort by number."""
    return f"{index:0{len(str(count))}}-of-{count}"
