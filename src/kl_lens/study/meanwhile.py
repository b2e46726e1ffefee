"""Work for a CPU that would wait while a GPU measures."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kl_lens.base.accelerators import on_host
from kl_lens.model import LoadedModel
from kl_lens.targets.base import StockRecipe
from kl_lens.weights.recipes import parsed
from kl_lens.weights.store import GivenWeights, WeightStore


class _Originals(GivenWeights):
    """Matrices on a GPU, copied to the host one at a time."""

    def weight(self, component: str) -> torch.Tensor:
        return on_host(super().weight(component))


@contextmanager
def quantizing_for(
    stock: Iterable[StockRecipe], model: LoadedModel, folder: Path
) -> Iterator[threading.Thread]:
    """Within, a thread makes the stock recipes' weights that only ggml's own code makes, and puts them into the cache
    `folder`, where `plan` and `export` find them. What it has not begun at the end, they make themselves."""
    wanted = dict.fromkeys(
        (component, recipe)
        for one in stock
        for component, recipe in parsed(one.assignment).items()
        if recipe.quantizer.is_expensive(recipe.grid) and not recipe.quantizer.learns
    )
    # Taken now: while it is measured, the model has other weights. The model's own store limits the cache.
    originals = {name: model.tensor(model.anatomy.component(name).weight) for name, _ in wanted}
    store = WeightStore(_Originals(originals), folder=folder, disk_budget=sys.maxsize, memory_budget=0)
    stopped = threading.Event()

    def work() -> None:
        if sys.platform == "linux":  # what is measured must not wait for it; its threads inherit this
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        device = model.chain.device
        with suppress(Exception):  # `plan` meets the same error and reports it
            # A stream of its own, so that copies do not wait for what is being measured.
            if device.type == "cuda":
                torch.cuda.set_stream(torch.cuda.Stream(device))  # of this thread
            for component, recipe in wanted:
                if stopped.is_set():
                    return
                store.quantized(component, recipe)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stopped.set()
        thread.join()
