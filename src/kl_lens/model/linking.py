"""What passes from block to block besides the hidden states: router states, shared keys and values.

Nothing is listed by architecture. While the blocks are bypassed, each returns a *mark* in place of every further
tensor. The model's own code passes the marks on; where one appears among a later block's arguments, that tensor
belongs. A dictionary that blocks write to is a *board*: each run gets its own copy, with the contents of that place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kl_lens.base.errors import CheckpointError

HIDDEN = object()  # marks the hidden states in a recorded call


@dataclass(frozen=True)
class Given:
    """Marks leaf number `leaf` of the output of block `block`; leaf 0 is its hidden states."""

    block: int
    leaf: int


@dataclass(frozen=True)
class Board:
    """Marks a dictionary that blocks read and write; `name` is the argument's."""

    name: str
    empty: MutableMapping[Any, Any] = field(compare=False, repr=False)

    def filled(self, contents: Mapping[Any, Any]) -> MutableMapping[Any, Any]:
        board = copy.copy(self.empty)
        board.update(contents)
        return board


@dataclass(frozen=True)
class States:
    """The input of a block: hidden states, and outputs of earlier blocks that it or later ones take."""

    hidden: torch.Tensor  # (batch, positions, width), or (batch, channels, height, width)
    carried: Mapping[Given | Board, Any] = field(default_factory=dict)  # a tensor, or a board's contents

    @staticmethod
    def stacked(parts: Sequence[States]) -> States:
        """Joins several batches at the same block."""

        def joined(first: Any, *others: Any) -> Any:
            return torch.cat([first, *others]) if isinstance(first, torch.Tensor) and first.dim() else first

        hidden = torch.cat([part.hidden for part in parts])
        return States(hidden, pytree.tree_map(joined, *(dict(part.carried) for part in parts)))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a block's arguments: (batch, positions, width), else an image with four axes."""
    given = [*args[:1], kwargs.get("hidden_states"), *args, *kwargs.values()]
    real = [value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
    for axes in (3, 4):
        if found := [value for value in real if value.dim() == axes]:
            return found[0]
    raise CheckpointError(
        "a block was called without hidden states (batch, positions, width) or (batch, channels, height, width)"
    )


def marked(call: Arguments, given: Mapping[int, Given], boards: set[str]) -> Arguments:
    """A call with marks for hidden states, outputs of earlier blocks (by id) and boards."""
    args, kwargs = call
    hidden = hidden_of(args, kwargs)

    def mark(value: Any) -> Any:
        if value is hidden:
            return HIDDEN
        return given.get(id(value), value) if isinstance(value, torch.Tensor) else value

    kwargs = {name: Board(name, copy.copy(v)) if name in boards else v for name, v in kwargs.items()}
    return pytree.tree_map(mark, (args, kwargs))
