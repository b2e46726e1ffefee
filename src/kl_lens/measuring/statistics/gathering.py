"""Gathers the second moments of every component's inputs, block by block.

All windows go through a block before the next begins, so memory holds the states of all windows and the moments of one
block (and of weights that later blocks share). An interrupted gathering is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kl_lens.base.errors import CheckpointError
from kl_lens.measuring.statistics.stored import LOOKED_UP, NO_INPUT, StoredStatistics
from kl_lens.measuring.statistics.watching import Moments, ProductWatch
from kl_lens.model import LoadedModel, States
from kl_lens.model.chain import BlockCalls, Chain
from kl_lens.run.records import Component
from kl_lens.text import Windows
from kl_lens.weights.quantizers import InputStatistics


def gather(
    model: LoadedModel,
    windows: Windows,
    run: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, blocks: None,
) -> StoredStatistics:
    """The statistics of all quantizable components on these windows, stored under `run`.

    Args:
        model: the model, on any device.
        windows: the calibration text.
        run: the run folder; results go to `statistics/` in it, and an earlier call is resumed.
        progress: called with (blocks done, blocks).

    Raises:
        RunError: the folder holds statistics of another model or text.
        CheckpointError: activations are not finite; names the component and the window.
    """
    stored = StoredStatistics.begun(run, model, windows)
    missing = [c for c in model.anatomy.candidates if c.name not in stored]
    if missing:
        with experts_one_by_one(model.model):
            _Gathering(model, windows, stored, missing).run(progress)
    return stored


class _Gathering:
    def __init__(
        self, model: LoadedModel, windows: Windows, stored: StoredStatistics, missing: Sequence[Component]
    ) -> None:
        self._model = model
        self._chain = model.chain
        self._stored = stored
        self._missing = missing
        self._tokens = windows.tokens
        self._batches = in_batches(windows, self._chain)
        self._moments: dict[str, Moments] = {}

    def run(self, progress: Callable[[int, int], None]) -> None:
        calls = [self._chain.calls(ids) for ids in self._batches]
        states = [States(call.hidden) for call in calls]
        for index, block in enumerate(self._chain.blocks):
            with self._model.present(block):
                watch = self._watch([c for c in self._missing if index in c.blocks])
                for number, call in enumerate(calls):
                    with watch(number):
                        states[number] = self._chain.run(states[number], call, index, index + 1)
                    self._check_states(states[number].hidden, f"after block {index}", number)
                done = [c for c in self._missing if c.blocks and c.blocks[-1] == index]
                self._store(f"block-{index:03d}.safetensors", done)
            progress(index + 1, len(self._chain))
        with self._model.present(self._model.model):
            self._outside(calls, states)

    def _outside(self, calls: Sequence[BlockCalls], states: Sequence[States]) -> None:
        """The head and other components outside the blocks."""
        anatomy = self._model.anatomy
        outside = [c for c in self._missing if not c.blocks]
        looked_up = [c for c in outside if c.name == anatomy.embedding != anatomy.head]
        multiplied = [c for c in outside if c not in looked_up]
        watch = self._watch(multiplied)
        for number, (call, state) in enumerate(zip(calls, states, strict=True)):
            with watch(number):
                final = self._chain.finish(state, call)  # stops before the head
            self._check_states(final, "before the head", number)
            if anatomy.head in self._moments:
                self._moments[anatomy.head].add(final)
        self._store("outside.safetensors", multiplied)
        for component in looked_up:
            self._stored.add_without_moments(component.name, LOOKED_UP, component.shape[-1], self._tokens)
            self._stored.add_weights(self._weights_of([component]))

    def _watch(self, components: Sequence[Component]) -> Callable[[int], ProductWatch]:
        for component in components:
            if component.name not in self._moments:
                self._moments[component.name] = Moments(component.shape, self._chain.device)
        here = {c.name: self._moments[c.name] for c in components}
        weights = self._weights_of(components)
        return lambda number: ProductWatch(weights, here, lambda x: self._place(x, number))

    def _weights_of(self, components: Sequence[Component]) -> dict[str, torch.Tensor]:
        return {c.name: self._model.tensor(c.weight) for c in components}

    def _store(self, file: str, components: Sequence[Component]) -> None:
        statistics: dict[str, InputStatistics] = {}
        notes: dict[str, str] = {}
        for component in components:
            moments = self._moments.pop(component.name)
            if moments.in_parts or not any(moments.tokens):
                note = "used only in parts" if moments.in_parts else "never used in a matrix product"
                if moments.stacked and not moments.in_parts:
                    note = "no token of this text was routed to its experts"
                self._stored.add_without_moments(component.name, note, None, 0)
                continue
            if not bool(moments.sums.any()):
                columns, tokens = moments.columns, sum(moments.tokens)
                self._stored.add_without_moments(component.name, NO_INPUT, columns, tokens)
                continue
            statistics[component.name] = InputStatistics(mean_moments(moments), tuple(moments.tokens))
            if few := [
                str(e) for e, n in enumerate(moments.tokens) if n < moments.columns and moments.stacked
            ]:
                notes[component.name] = (
                    f"experts {', '.join(few)} saw fewer tokens than they have columns: filled up with the overall mean"
                )
        self._stored.add(file, statistics, notes, self._weights_of(components))

    def _check_states(self, states: torch.Tensor, where: str, number: int) -> None:
        if not bool(torch.isfinite(states).all()):
            place = self._place(states, number)
            raise CheckpointError(
                f"{self._model.name}: states {where} hold NaN or infinity {place}; "
                "repair the checkpoint, or load it in float32"
            )

    def _place(self, inputs: torch.Tensor, number: int) -> str:
        """`in window 3`, or the windows of the batch if tokens were reordered."""
        first = sum(len(ids) for ids in self._batches[:number])
        count = len(self._batches[number])
        if inputs.shape[0] == count:
            bad = ~torch.isfinite(inputs.reshape(count, -1)).all(1)
            return (
                f"in window {first + int(bad.nonzero()[0, 0])}" if bool(bad.any()) else f"from window {first}"
            )
        return f"in windows {first} to {first + count - 1}"


def in_batches(windows: Windows, chain: Chain) -> list[torch.Tensor]:
    size = max(1, chain.task.rows_at_once // windows.length)
    return [windows.ids[first : first + size] for first in range(0, len(windows), size)]


def mean_moments(moments: Moments) -> torch.Tensor:
    """E[x xᵀ] in float32; an expert with fewer tokens than columns is filled up with the mean over all experts."""
    tokens = torch.tensor(moments.tokens, dtype=torch.float64, device=moments.sums.device)[:, None, None]
    overall = moments.sums.sum(0) / tokens.sum()
    lacking = (moments.columns - tokens).clamp_min(0) if moments.stacked else torch.zeros_like(tokens)
    means = ((moments.sums + lacking * overall) / (tokens + lacking)).float()
    return means if moments.stacked else means[0]


@contextmanager
def experts_one_by_one(model: Any) -> Iterator[None]:
    """Makes transformers multiply with each expert's slice; its faster ways copy the experts."""
    before = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if before in (None, "eager") or not hasattr(model, "set_experts_implementation"):
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
