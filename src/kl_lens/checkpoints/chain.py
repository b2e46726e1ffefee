"""The model as a chain: embedding → blocks → final norm → head, found by watching one forward, not listed.

The blocks are the `ModuleList` whose members run once each, in order, each taking what the one before gave.
Everything around them stays the model's own code: to learn the arguments of each block, or to get from the last
block to the logits, the model's own `forward` runs with its blocks bypassed. So masks, rotary embeddings, meta
tokens, shared blocks, logit scaling and whatever a new architecture brings come out right without being known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kl_lens.checkpoints.kernels import fast_kernels
from kl_lens.errors import CheckpointError


class _Stop(Exception):
    """Ends a forward early, once what was wanted has been seen."""


class _Hidden:
    """Marks the place of the hidden state in a recorded call."""

    def __repr__(self) -> str:
        return "<hidden states>"


_HIDDEN = _Hidden()


@dataclass(frozen=True)
class BlockCalls:
    """For one batch of token ids: what enters the first block, and every block's other call arguments."""

    ids: torch.Tensor  # (batch, time)
    hidden: torch.Tensor  # (batch, positions, width): positions may exceed time (meta tokens)
    arguments: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]

    @property
    def batch(self) -> int:
        return self.ids.shape[0]


class Chain:
    """Runs any stretch of a causal language model's blocks from given hidden states.

    Example:
        >>> calls = chain.calls(ids)
        >>> half = chain.run(calls.hidden, calls, 0, 12)
        >>> final = chain.run(half, calls, 12, len(chain))
        >>> logits = chain.logits(chain.finish(final, calls))    # equals model(ids).logits
    """

    def __init__(self, model: nn.Module, *, fast: bool = True) -> None:
        self.model = model
        self.fast = fast
        self.head = _find_head(model)
        self._watch()

    def __len__(self) -> int:
        return len(self.blocks)

    # -- finding the chain ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Two small forwards of different batch size show the blocks, the hidden state and batched arguments."""
        vocabulary = _vocabulary_size(self.model)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (3, 5), generator=generator).to(self.device)
        self.blocks_name, self.blocks = _find_blocks(self.model, lambda: self._forward(ids[:2]))
        calls, outputs = self._record(ids[:2])
        # How many values each block returns as a tuple; None where it returns the hidden states alone.
        self._output_lengths = [len(o) if isinstance(o, (tuple, list)) else None for o in outputs]
        _check_linked(self.blocks_name, calls, outputs)
        self._batched = self._find_batched_arguments(ids)
        self._head_scale = self._find_head_scale(ids[:2])

    def _record(self, ids: torch.Tensor) -> tuple[list[Any], list[Any]]:
        """Each block's call and output in a full forward."""
        calls: list[Any] = []
        outputs: list[Any] = []

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((args, kwargs))
            outputs.append(output)

        handles = [block.register_forward_hook(after, with_kwargs=True) for block in self.blocks]
        try:
            self._forward(ids)
        finally:
            for handle in handles:
                handle.remove()
        return calls, outputs

    def _find_batched_arguments(self, ids: torch.Tensor) -> tuple[tuple[bool, ...], ...]:
        """For every tensor argument of every block: does its first axis follow the batch?"""
        two, three = self.calls(ids[:2]), self.calls(ids)
        found = []
        for smaller, larger in zip(two.arguments, three.arguments, strict=True):
            pairs = zip(pytree.tree_leaves(smaller), pytree.tree_leaves(larger), strict=True)
            found.append(
                tuple(
                    isinstance(a, torch.Tensor) and a.dim() > 0 and (a.shape[0], b.shape[0]) == (2, 3)
                    for a, b in pairs
                )
            )
        return tuple(found)

    def _find_head_scale(self, ids: torch.Tensor) -> float | None:
        """The factor between the head's output and the logits; None when it is no plain factor."""
        seen: list[torch.Tensor] = []
        handle = self.head.register_forward_hook(lambda _m, _a, output: seen.append(output))
        try:
            logits = self._forward(ids)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0].shape != logits.shape:
            return None
        largest = int(seen[0].abs().argmax())
        scale = float(logits.flatten()[largest] / seen[0].flatten()[largest])
        for candidate in (1.0, scale):
            if torch.allclose(seen[0] * candidate, logits, rtol=1e-6, atol=0):
                return candidate
        return None

    # -- running ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Our fast kernels inside the model's layers, when this chain uses them."""
        with fast_kernels(self.model) if self.fast else nullcontext():
            yield

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), self.kernels():
            return _own_forward(self.model, ids)

    def full_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's own forward: (batch, time, vocabulary)."""
        return self._forward(ids.to(self.device))

    def calls(self, ids: torch.Tensor) -> BlockCalls:
        """What enters the first block for these token ids, and the other arguments of every block."""
        ids = ids.to(self.device)
        calls: list[Any] = []

        def bypass(args: Any, kwargs: Any) -> torch.Tensor:
            calls.append((args, kwargs))
            return _hidden_of(args, kwargs)

        with self._blocks_bypassed(bypass), _stopping_at(self.head):
            self._forward(ids)
        hidden = _hidden_of(*calls[0])
        arguments = tuple(_without_hidden(args, kwargs) for args, kwargs in calls)
        return BlockCalls(ids, hidden, arguments)

    def run(
        self,
        hidden: torch.Tensor,
        calls: BlockCalls,
        start: int,
        stop: int | None = None,
        *,
        keep: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Blocks `start` to `stop` (exclusive) on the states that enter block `start`.

        `hidden` may stack k copies of the batch along the first axis: the arguments are repeated to fit.
        `keep(index, states)` sees what enters each block.
        """
        stop = len(self) if stop is None else stop
        copies, remainder = divmod(hidden.shape[0], calls.hidden.shape[0])
        if remainder or not copies:
            raise ValueError(f"{hidden.shape[0]} sequences are no multiple of the batch of {calls.batch}")
        with torch.inference_mode(), self.kernels():
            for index in range(start, stop):
                if keep is not None:
                    keep(index, hidden)
                args, kwargs = self._arguments(calls, index, copies)
                args = tuple(hidden if a is _HIDDEN else a for a in args)
                kwargs = {name: hidden if a is _HIDDEN else a for name, a in kwargs.items()}
                output = self.blocks[index](*args, **kwargs)
                hidden = output[0] if isinstance(output, (tuple, list)) else output
        return hidden

    def _arguments(
        self, calls: BlockCalls, index: int, copies: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if copies == 1:
            return calls.arguments[index]
        leaves, structure = pytree.tree_flatten(calls.arguments[index])
        repeated = [
            leaf.repeat(copies, *[1] * (leaf.dim() - 1)) if batched else leaf
            for leaf, batched in zip(leaves, self._batched[index], strict=True)
        ]
        return pytree.tree_unflatten(repeated, structure)

    def finish(self, hidden: torch.Tensor, calls: BlockCalls) -> torch.Tensor:
        """From the last block's output to what enters the head: (batch, time, width)."""
        copies = hidden.shape[0] // calls.hidden.shape[0]
        ids = calls.ids.repeat(copies, 1)
        with self._blocks_bypassed(lambda args, kwargs: hidden), _stopping_at(self.head) as seen:
            self._forward(ids)
        return seen[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of states that enter the head, (…, width) → (…, vocabulary)."""
        with torch.inference_mode():
            if self._head_scale is not None:
                logits = self.head(states)
                return logits if self._head_scale == 1.0 else logits.mul_(self._head_scale)
            # Something else follows the head: let the model's own code do it, on these states.
            rows = states.reshape(1, -1, states.shape[-1])
            ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=self.device)
            handle = self.head.register_forward_pre_hook(lambda _module, _args: (rows,))
            try:
                with self._blocks_bypassed(_hidden_of):
                    logits = self._forward(ids)
            finally:
                handle.remove()
            return logits.reshape(*states.shape[:-1], -1)

    @contextmanager
    def _blocks_bypassed(self, output_for: Callable[[Any, Any], torch.Tensor]) -> Iterator[None]:
        """Within the block, each chain member returns `output_for(args, kwargs)` in place of its own work."""

        def stand_in(length: int | None) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden = output_for(args, kwargs)
                return hidden if length is None else (hidden, *[None] * (length - 1))

            return forward

        for block, length in zip(self.blocks, self._output_lengths, strict=True):
            block.forward = stand_in(length)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


@contextmanager
def _stopping_at(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within the block, a forward ends where `module` would run; what would have entered it is yielded."""
    seen: list[torch.Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])
        raise _Stop

    handle = module.register_forward_pre_hook(stop)
    try:
        yield seen
    except _Stop:
        pass
    finally:
        handle.remove()


def _own_forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, use_cache=False)
    return output.logits if hasattr(output, "logits") else output[0]


def _vocabulary_size(model: nn.Module) -> int:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _find_head(model: nn.Module) -> nn.Module:
    head: nn.Module | None = None
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        wide = [m for m in model.modules() if isinstance(m, nn.Linear)]
        wide = [m for m in wide if m.out_features == _vocabulary_size(model)]
        head = wide[-1] if wide else None
    if head is None:
        raise CheckpointError(
            f"{type(model).__name__} has no language-model head (a linear layer to the vocabulary); "
            "KL Lens measures causal language models"
        )
    return head


def _find_blocks(model: nn.Module, forward: Callable[[], Any]) -> tuple[str, Sequence[nn.Module]]:
    """The longest-reaching `ModuleList` whose members run once each and in order; outer lists win."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    order: list[tuple[int, int]] = []
    handles = []
    for number, (_, members) in enumerate(lists):
        for index, member in enumerate(members):
            hook = lambda *_, number=number, index=index: order.append((number, index))  # noqa: E731
            handles.append(member.register_forward_pre_hook(hook))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    best: tuple[int, int] | None = None  # (parameters, list)
    for number, (_, members) in enumerate(lists):
        ran = [index for which, index in order if which == number]
        if len(members) and ran == list(range(len(members))):
            weight = sum(p.numel() for p in members.parameters())
            if best is None or weight > best[0]:
                best = (weight, number)
    if best is None:
        raise CheckpointError(
            f"{type(model).__name__}: found no chain of blocks (a ModuleList whose members run once each, "
            f"in order) among {[name for name, _ in lists] or 'no lists at all'}; "
            "KL Lens needs embedding → blocks → norm → head"
        )
    name, members = lists[best[1]]
    return name, list(members)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if args and _is_hidden(args[0]):
        return args[0]
    if _is_hidden(kwargs.get("hidden_states")):
        return kwargs["hidden_states"]
    for value in [*args, *kwargs.values()]:
        if _is_hidden(value):
            return value
    raise CheckpointError("a block of the chain was called without hidden states (batch, positions, width)")


def _without_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = _hidden_of(args, kwargs)
    return (
        tuple(_HIDDEN if a is hidden else a for a in args),
        {name: _HIDDEN if a is hidden else a for name, a in kwargs.items()},
    )


def _check_linked(name: str, calls: list[Any], outputs: list[Any]) -> None:
    """Each block must take exactly what the one before it gave; otherwise a suffix could not be run alone."""
    for index, (call, output) in enumerate(zip(calls[1:], outputs[:-1], strict=True)):
        given = output[0] if isinstance(output, (tuple, list)) else output
        if not torch.equal(_hidden_of(*call), given):
            raise CheckpointError(
                f"{name}.{index + 1} does not take what {name}.{index} gives: the model changes the hidden states "
                "between blocks, so its blocks form no chain that KL Lens can run in parts"
            )
