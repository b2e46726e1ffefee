"""Quantizing in order: each component sees the inputs that the quantized components before it give, and corrects for
their errors.

Components are taken in the order of the forward pass. With x the inputs of one in the original and x̃ its inputs after
everything quantized so far, H̃ = E[x̃ x̃ᵀ] and the weight is corrected by

    Δ = E[d x̃ᵀ] (H̃ + ρ I)⁻¹,    d = W (x − x̃)

where d is what its outputs lack. If the outputs are added directly to the block's output (tested by changing the weight
a little), d is all that the block's output lacks, so that errors of earlier blocks are corrected too. The method
`ordered` rounds W + Δ with error feedback on H̃. ρ limits the correction: no linear map of x̃ can give most of d.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kl_lens.calibration.gathering import experts_one_by_one, in_batches
from kl_lens.calibration.stored import IN_ORDER, StoredStatistics
from kl_lens.calibration.watching import ProductWatch
from kl_lens.checkpoints import LoadedModel, States
from kl_lens.checkpoints.chain import BlockCalls
from kl_lens.quantizers import InputStatistics
from kl_lens.recipes import Recipe
from kl_lens.records import Component
from kl_lens.text import Windows
from kl_lens.weights.store import Statistics

RIDGE = 1.0  # ρ, relative to the mean square of the inputs
_MOVED = 0.1  # relative change of a weight in the test
_STRAIGHT = 0.01  # unexplained share of the change that still counts as direct


def plan_key(assignment: Mapping[str, str]) -> str:
    spelled = json.dumps(sorted(assignment.items())).encode()
    return hashlib.blake2b(spelled, digest_size=8).hexdigest()


def gather_in_order(
    model: LoadedModel,
    windows: Windows,
    run: Path,
    plain: Statistics,
    recipes: Mapping[str, Recipe],
    *,
    progress: Callable[[int, int], None] = lambda done, blocks: None,
) -> StoredStatistics:
    """The statistics for a plan's `ordered` recipes, stored under `run`; the model's weight store uses them.

    Args:
        plain: statistics of components that cannot be done in order (embedding, shared by blocks, experts).
        recipes: component → recipe; those that learn are `ordered`.
        progress: called with (blocks done, blocks).
    """
    model.require_memory("quantizing in order")
    stored = StoredStatistics.begun(run / IN_ORDER, model, windows, plan_key(recipes))
    model.weights.learn_in_order(stored)
    with experts_one_by_one(model.model):
        _Ordering(model, windows, stored, plain, recipes).run(progress)
    return stored


class Inputs:
    """The inputs of one weight, batch by batch; `ProductWatch` fills it."""

    def __init__(self, name: str, columns: int, seen: list[str]) -> None:
        self.columns, self.in_parts = columns, False
        self.rows: list[torch.Tensor] = []
        self._name, self._seen = name, seen

    def add(self, inputs: torch.Tensor, expert: int = 0) -> bool:
        if self._name not in self._seen:
            self._seen.append(self._name)
        self.rows.append(inputs.reshape(-1, self.columns).float())
        return bool(torch.isfinite(self.rows[-1].sum()))


class _Ordering:
    def __init__(
        self,
        model: LoadedModel,
        windows: Windows,
        stored: StoredStatistics,
        plain: Statistics,
        recipes: Mapping[str, Recipe],
    ) -> None:
        self._model, self._chain, self._stored, self._plain = model, model.chain, stored, plain
        self._recipes = recipes
        self._components = {c.name: c for c in model.anatomy.candidates if c.name in self._recipes}
        self._batches = in_batches(windows, self._chain)
        self._placed: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # parameter, original values

    def run(self, progress: Callable[[int, int], None]) -> None:
        calls = [self._chain.calls(ids) for ids in self._batches]
        states = [States(call.hidden) for call in calls]
        outside = [c for c in self._components.values() if not c.blocks]
        head = self._model.anatomy.head
        try:
            for component in outside:
                if component.name != head or head == self._model.anatomy.embedding:
                    self._place(component)
            own_calls = [self._chain.calls(ids) for ids in self._batches]
            own = [States(call.hidden) for call in own_calls]
            for index in range(len(self._chain)):
                states, own = self._block(index, calls, states, own_calls, own)
                progress(index + 1, len(self._chain))
            if head in self._components and head not in self._stored:
                self._head(self._components[head], calls, states, own_calls, own)
        finally:
            for parameter, original in reversed(self._placed):
                parameter.data = original

    def _block(
        self,
        index: int,
        calls: Sequence[BlockCalls],
        states: Sequence[States],
        own_calls: Sequence[BlockCalls],
        own: Sequence[States],
    ) -> tuple[list[States], list[States]]:
        """Quantizes a block's components in order; returns its output in the original and in the quantized model."""
        here = [c for c in self._components.values() if c.blocks and c.blocks[0] == index]
        with self._as_it_was():
            inputs, after = self._watched(index, here, calls, states)
        seen = sorted(here, key=lambda c: self._seen.index(c.name) if c.name in self._seen else -1)
        for component in seen:
            if self._is_wanted(component) and self._fits(component, inputs[component.name], states):
                self._learn(component, index, inputs[component.name].rows, after, own_calls, own)
            self._place(component)
        return after, [self._chain.run(s, c, index, index + 1) for s, c in zip(own, own_calls, strict=True)]

    def _is_wanted(self, component: Component) -> bool:
        recipe = self._recipes[component.name]
        return recipe.quantizer.of_a_plan and component.name not in self._stored

    def _fits(self, component: Component, inputs: Inputs, states: Sequence[States]) -> bool:
        """One matrix of one block, used once per position."""
        positions = [state.hidden.shape[:-1].numel() for state in states]
        whole = [len(rows) for rows in inputs.rows] == positions and not inputs.in_parts
        return whole and len(component.shape) == 2 and len(component.blocks) == 1

    def _watched(
        self,
        index: int,
        components: Sequence[Component],
        calls: Sequence[BlockCalls],
        states: Sequence[States],
    ) -> tuple[dict[str, Inputs], list[States]]:
        self._seen: list[str] = []
        inputs = {c.name: Inputs(c.name, c.shape[-1], self._seen) for c in components}
        weights = {c.name: self._model.model.get_parameter(c.weight).data for c in components}
        with ProductWatch(weights, inputs, lambda _: f"in block {index}"):
            after = [self._chain.run(s, c, index, index + 1) for s, c in zip(states, calls, strict=True)]
        return inputs, after

    def _learn(
        self,
        component: Component,
        index: int,
        inputs: Sequence[torch.Tensor],
        after: Sequence[States],
        own_calls: Sequence[BlockCalls],
        own: Sequence[States],
    ) -> None:
        seen, given = self._watched(index, [component], own_calls, own)
        rows = seen[component.name].rows
        weight = self._model.model.get_parameter(component.weight).data.float()
        factor = self._added_straight(component, index, rows[0], given[0], own_calls[0], own[0])
        if factor is None:
            lacking = [before - now for before, now in zip(inputs, rows, strict=True)]
        else:
            pairs = zip(after, given, strict=True)
            lacking = [(a.hidden - b.hidden).flatten(0, -2).float() / factor for a, b in pairs]
        self._keep(component, rows, lacking, None if factor is not None else weight)

    def _added_straight(
        self, component: Component, index: int, rows: torch.Tensor, given: States, calls: BlockCalls, own: States
    ) -> float | None:  # fmt: skip
        """The factor with which a component's outputs are added to the block's output; None if they go elsewhere
        too."""
        parameter = self._model.model.get_parameter(component.weight)
        if parameter.shape[0] != given.hidden.shape[-1]:
            return None
        expected = (rows @ parameter.data.float().T) * _MOVED
        original = parameter.data
        try:
            parameter.data = original * (1 + _MOVED)
            moved = self._chain.run(own, calls, index, index + 1)
        finally:
            parameter.data = original
        change = (moved.hidden - given.hidden).flatten(0, -2).float()
        factor = float((change * expected).sum() / expected.square().sum().clamp_min(1e-30))
        left = float((change - factor * expected).norm() / change.norm().clamp_min(1e-30))
        return factor if left < _STRAIGHT and factor else None

    def _head(
        self,
        component: Component,
        calls: Sequence[BlockCalls],
        states: Sequence[States],
        own_calls: Sequence[BlockCalls],
        own: Sequence[States],
    ) -> None:
        if not self._is_wanted(component):
            return
        with self._as_it_was():
            before = [self._final(s, c) for s, c in zip(states, calls, strict=True)]
        now = [self._final(s, c) for s, c in zip(own, own_calls, strict=True)]
        weight = self._model.model.get_parameter(component.weight).data.float()
        self._keep(component, now, [b - n for b, n in zip(before, now, strict=True)], weight)

    def _final(self, states: States, calls: BlockCalls) -> torch.Tensor:
        return self._chain.finish(states, calls).flatten(0, -2).float()

    def _keep(
        self, component: Component, rows: Sequence[torch.Tensor], lacking: Sequence[torch.Tensor],
        weight: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Stores H̃ and Δ; `lacking` holds inputs (to be multiplied by the weight) or outputs."""
        tokens = sum(len(part) for part in rows)
        moments = sum(part.T.double() @ part.double() for part in rows) / tokens
        cross = sum(d.T.double() @ part.double() for d, part in zip(lacking, rows, strict=True)) / tokens
        assert isinstance(moments, torch.Tensor) and isinstance(cross, torch.Tensor)  # noqa: PT018
        ridge = RIDGE * moments.diagonal().mean()
        if not bool(ridge > 0):
            return  # all inputs are zero
        identity = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        linear = torch.linalg.solve(moments + ridge * identity, cross.T).T.float()
        correction = linear if weight is None else weight @ linear
        found = InputStatistics(moments.float().cpu(), (tokens,), correction=correction.cpu())
        self._stored.add(f"{component.name}.safetensors", {component.name: found}, {})

    def _place(self, component: Component) -> None:
        """Replaces the component by its quantized values."""
        name, recipe = component.name, self._recipes[component.name]
        if recipe.quantizer.of_a_plan and name not in self._stored:
            self._stored.add(
                f"{name}.safetensors",
                {name: self._plain.of(name)},
                {name: "not in order: uses the plain statistics"},
            )
        values = self._model.weights.values(name, recipe)
        for parameter in self._model.parameters_of(component):
            self._placed.append((parameter, parameter.data))
            parameter.data = values.to(parameter.dtype)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Restores the original weights within the block."""
        quantized = [(parameter, parameter.data) for parameter, _ in self._placed]
        try:
            for parameter, original in self._placed:
                parameter.data = original
            yield
        finally:
            for parameter, values in quantized:
                parameter.data = values
