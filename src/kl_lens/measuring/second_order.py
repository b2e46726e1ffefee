"""What candidates lose, to second order, from a few gradients of the original model.

Labels y are drawn from the model's own output at every position, and G is the gradient of −Σ log p(y) over a window. A
weight that changes by D then changes the window's KL by ½ E[(G · D)²]. Rows of a weight are rounded independently, so
products of different rows cancel on average; without them, ½ E[Σ (Gᵢ · Dᵢ)²] over the rows i, the estimate has the same
mean and a small part of the noise.

One pass backwards goes from block to block: a block is run again with gradients, these are multiplied and dropped. So
it needs the memory of one block, and the weights may stay on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from kl_lens.base.errors import RunError
from kl_lens.measuring.engines import memory_on, ranges
from kl_lens.measuring.perturbation import Candidate, key_of
from kl_lens.measuring.products import FLOAT32, TensorCores
from kl_lens.measuring.teacher import Batch, Teacher, logit_rows, window_bytes
from kl_lens.model import LoadedModel, States
from kl_lens.model.tasks import UNCOUNTED
from kl_lens.weights.recipes import Recipe

Key = tuple[str, Recipe]  # component and recipe
GRADIENTS = 16  # windows, or draws of labels on fewer windows
# Forward passes that take as long as one gradient. Under autograd, scans of Mamba-1 are made of torch's operations.
PASSES = 4
PASSES_OF_SCANS = 40
SCANNED = "x_proj"  # kind of component that only Mamba-1 has


def gradient_work(model: LoadedModel) -> float:
    """Of all gradients, in the units of a sweep's progress."""
    anatomy = model.anatomy
    scans = any(component.kind == SCANNED for component in anatomy.candidates)
    head = anatomy.component(anatomy.head).parameters
    passes = PASSES_OF_SCANS if scans else PASSES
    return GRADIENTS * passes * (anatomy.parameters + head)


def second_order(
    model: LoadedModel,
    candidates: Sequence[Candidate],
    ids: Tensor,
    memory_budget: int,
) -> dict[Key, float]:
    """The KL per token of each candidate inside the blocks. The labels depend on `ids` alone.

    Raises what torch raises if a layer of this model has no gradient.
    """
    chain = model.chain
    if doubt := chain.doubt(ids):
        raise RunError(doubt)
    chain.uses_kernels(gradients=True)
    ids = ids[:GRADIENTS]
    vocabulary, width = model.anatomy.component(model.anatomy.head).shape
    room = memory_on(chain.device, memory_budget) // 2
    slab = max(1, room // window_bytes(chain, ids.shape[1], width, vocabulary))
    draws = -(-GRADIENTS // len(ids))
    inside = [candidate for candidate in candidates if candidate.component.blocks]
    totals = dict.fromkeys(map(key_of, inside), 0.0)
    tokens = 0
    for windows in ranges(len(ids), slab):
        passes = _Passes(model, ids, windows, draws)
        for key, damage in passes.damage(inside).items():
            totals[key] += damage
        tokens += passes.tokens
    return {key: total / tokens for key, total in totals.items()}


@dataclass
class _Window:
    """One window on its way back through the blocks, with several draws of labels."""

    batch: Batch
    # Of each draw: the gradients of the tensors that leave a block.
    gradients: list[list[Tensor | None]]
    # Candidate and draw → G · D of every row, summed over the blocks that share the weight.
    products: dict[tuple[Key, int], Tensor] = field(default_factory=dict)


class _Passes:
    """Backward passes over some windows, all through one block before the next."""

    def __init__(
        self, model: LoadedModel, ids: Tensor, windows: range, draws: int
    ) -> None:
        self._model = model
        self._chain = chain = model.chain
        self._rows = logit_rows(model.anatomy.component(model.anatomy.head).shape[0])
        slab = ids[windows.start : windows.stop]
        products = TensorCores([], FLOAT32)
        teacher = Teacher(model, slab, products, ids.shape[1], self._rows, budget=0)
        self._windows = []
        with model.present(chain.head):
            for number, batch in zip(windows, teacher.batches, strict=True):
                generator = torch.Generator().manual_seed(number)
                gradients = [[self._of_head(batch, generator)] for _ in range(draws)]
                self._windows.append(_Window(batch, gradients))
        counted = [(batch.answers != UNCOUNTED).sum() for batch in teacher.batches]
        self.tokens = draws * int(sum(counted))

    def _of_head(self, batch: Batch, generator: torch.Generator) -> Tensor | None:
        """The gradient of the head's inputs, for labels that are drawn now."""
        states = _tracked(batch.states.flatten(0, 1))
        gradient = torch.zeros_like(states)
        for rows in ranges(batch.rows, self._rows):
            part = slice(rows.start, rows.stop)
            logits = self._chain.logits(states[part], gradients=True).float()
            steps = logits.detach().softmax(-1).cumsum(-1)
            draw = torch.rand(len(logits), 1, generator=generator).to(steps.device)
            labels = torch.searchsorted(steps, draw * steps[:, -1:]).flatten()
            labels[batch.targets.flatten()[part] == UNCOUNTED] = UNCOUNTED
            loss = functional.cross_entropy(
                logits, labels, ignore_index=UNCOUNTED, reduction="sum"
            )
            gradient += torch.autograd.grad(loss, states)[0]
        return gradient.view_as(batch.states)

    def damage(self, candidates: Sequence[Candidate]) -> dict[Key, float]:
        """The KL of each candidate, summed over the tokens of all draws."""
        for index in reversed(range(len(self._chain))):
            here = [c for c in candidates if index in c.component.blocks]
            with self._model.present(self._chain.blocks[index]):
                self._through(index, here)
        totals = dict.fromkeys(map(key_of, candidates), 0.0)
        for window in self._windows:
            for (key, _), rows in window.products.items():
                totals[key] += 0.5 * float(rows.square().sum(dtype=torch.float64))
        return totals

    def _through(self, index: int, candidates: Sequence[Candidate]) -> None:
        """All windows back through one block."""
        inside = {id(p) for p in self._chain.blocks[index].parameters()}
        parameters = {
            c.component.name: parameter
            for c in candidates
            for parameter in self._model.parameters_of(c.component)
            if id(parameter) in inside
        }
        changes = {
            key_of(c): self._model.weights.values(*key_of(c))
            - parameters[c.component.name].float()
            for c in candidates
        }
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        try:
            for window in self._windows:
                self._back(window, index, parameters, changes)
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(False)

    def _back(
        self,
        window: _Window,
        index: int,
        parameters: Mapping[str, torch.nn.Parameter],
        changes: Mapping[Key, Tensor],
    ) -> None:
        """One window back through one block: takes its products, and the gradients of what enters the block."""
        entering = window.batch.inputs[index]
        hidden, carried = pytree.tree_map(
            _tracked, (entering.hidden, dict(entering.carried))
        )
        arguments = list(window.batch.calls.arguments)
        arguments[index] = pytree.tree_map(_usual, arguments[index])
        calls = replace(window.batch.calls, arguments=tuple(arguments))
        left = self._chain.run(
            States(hidden, carried), calls, index, index + 1, gradients=True
        )
        outputs = pytree.tree_leaves((left.hidden, dict(left.carried)))
        if index + 1 == len(self._chain):
            outputs = [self._chain.finish(left, calls, gradients=True)]
        inputs = pytree.tree_leaves((hidden, carried))
        leaves = [*filter(_has_gradient, inputs), *parameters.values()]
        for draw, gradients in enumerate(window.gradients):
            given = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and _has_gradient(output)
            ]
            found = torch.autograd.grad(
                [output for output, _ in given],
                leaves,
                [gradient for _, gradient in given],
                retain_graph=draw + 1 < len(window.gradients),
                allow_unused=True,
            )
            by_leaf = {
                id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)
            }
            window.gradients[draw] = [by_leaf.get(id(leaf)) for leaf in inputs]
            for key, change in changes.items():
                if (gradient := by_leaf[id(parameters[key[0]])]) is not None:
                    rows = (gradient.float() * change).sum(-1)
                    before = window.products.get((key, draw), 0.0)
                    window.products[key, draw] = before + rows


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _usual(leaf: Any) -> Any:
    """A tensor made in inference mode as one that autograd takes."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _tracked(leaf: Any) -> Any:
    leaf = _usual(leaf)
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.requires_grad_(True)
    return leaf
