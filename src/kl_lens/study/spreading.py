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
    name: str | None,
    opening: Opening,
    weights: str,
    memory_budget: int,
    operations: float,
    events: Events,
) -> AbstractContextManager[Workers | None]:
    """The workers for a sweep, or None to measure in this process.

    Args:
        name: what opens the model (default: where it came from), with `opening` and `weights`.
        operations: work left to do; with none, no process is started.
    """
    copy = _weights(model)
    count = processes.workers
    if processes.ray is None:
        count = count or _by_default(model, copy, memory_budget, operations)
        if count == 1 or not operations:
            return nullcontext()
        if model.chain.device.type != "cpu":
            raise KLLensError(
                f"--workers {count} on {model.chain.device}: GPU workers need Ray; add --ray local or --device cpu"
            )
        if processes.workers is None:
            events.note(f"measuring with {count} processes; --workers 1 uses only this one")
        opening = replace(opening, device=model.chain.device.type)  # `auto` is decided here
    place = name or model.source or model.name
    images = _absolute(opening.images or own_images(place))
    # Each worker checks whether the weights fit into its memory.
    room = None if memory_budget == DEFAULT_MEMORY else memory_budget
    task = "image" if images else None
    how = asdict(replace(opening, images=images)) | {"task": task, "weights": weights, "memory_budget": room}
    order = Order(_absolute(place) or place, how, model.fingerprint)
    return hired(order, count, processes.ray, processes.gpus_per_worker, copy, events.note)


def _by_default(model: LoadedModel, weights: int, budget: int, operations: float) -> int:
    chain = model.chain
    if model.residency is not None or chain.device.type != "cpu":
        return 1
    vocabulary, width = (int(n) for n in chain.head.weight.shape)  # type: ignore[union-attr]
    copy = weights * (2 if gains_by_input_major(chain.device) else 1)
    copy += window_bytes(chain, chain.task.rows_at_once, width, vocabulary)
    return workers_by_default(threads_here(), copy, budget, available_memory(), operations)


def _weights(model: LoadedModel) -> int:
    """Bytes of weights in memory."""
    if (there := model.residency) is not None:
        return there.resident_bytes + BLOCKS_AT_ONCE * there.block_bytes
    return sum(p.nbytes for p in model.model.parameters())


def _absolute(place: str | None) -> str | None:
    """An absolute path if the place exists; other names are unchanged."""
    expanded = os.path.expanduser(place or "")
    return os.path.abspath(expanded) if os.path.exists(expanded) else place


def share_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`3/16` → (3, 16); `slurm` → from the variables of a Slurm job array."""
    if text == SLURM:
        return _slurm(environment)
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(text))
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
            f"--shard {SLURM}: task {place} does not belong to {count} tasks from {first} in steps of {step}; "
            "give the array as one range (sbatch --array=1-16)"
        )
    return index + 1, count


def shard_name(index: int, count: int) -> str:
    """Zero-padded, so that folders sort by number."""
    return f"{index:0{len(str(count))}}-of-{count}"
