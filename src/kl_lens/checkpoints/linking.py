"""What passes from block to block besides the hidden states: router states, shared keys and values.

Nothing is listed by architecture. While the blocks are bypassed each gives a *mark* in the place of every further
tensor that it returns; the model's own code hands the marks on, and where a mark turns up among a later block's
arguments, there that tensor belongs. A dictionary that blocks write into is a *board*: each run gets one of its own,
filled with what stood on it at that place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


class _Hidden:
    """Marks the place of the hidden states in a recorded call."""

    def __repr__(self) -> str:
        return "<hidden states>"


HIDDEN = _Hidden()


@dataclass(frozen=True)
class Given:
    """Marks a tensor that block number `block` returns as the leaf `leaf` of its output; 0 are its hidden states."""

    block: int
    leaf: int


@dataclass(frozen=True)
class Board:
    """Marks a dictionary that blocks read from and write to; `name` is the argument's."""

    name: str
    empty: MutableMapping[Any, Any] = field(compare=False, repr=False)

    def filled(self, contents: Mapping[Any, Any]) -> MutableMapping[Any, Any]:
        board = copy.copy(self.empty)
        board.update(contents)
        return board


@dataclass(frozen=True)
class States:
    """What enters a block: the hidden states, and what earlier blocks gave that it or later ones take."""

    hidden: torch.Tensor  # (batch, positions, width), or (batch, channels, height, width)
    carried: Mapping[Given | Board, Any] = field(default_factory=dict)  # tensor, or a board's contents

    def repeated(self, copies: int) -> States:
        """The batch so many times over, along the first axis of everything."""
        return States.stacked([self] * copies)

    @staticmethod
    def stacked(parts: Sequence[States]) -> States:
        """Several batches that are at the same place, as one."""
        hidden = torch.cat([part.hidden for part in parts])
        trees = [pytree.tree_flatten(dict(part.carried)) for part in parts]
        structure = trees[0][1]
        leaves = [_joined(group) for group in zip(*(branch for branch, _ in trees), strict=True)]
        return States(hidden, pytree.tree_unflatten(leaves, structure))


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    return torch.cat(list(parts)) if isinstance(first, torch.Tensor) and first.dim() else first


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def is_hidden(value: Any, axes: int = 3) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == axes and value.is_floating_point()


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The hidden states among a block's arguments: (batch, positions, width), or failing that an image's four axes."""
    for axes in (3, 4):
        if args and is_hidden(args[0], axes):
            return args[0]
        if is_hidden(kwargs.get("hidden_states"), axes):
            return kwargs["hidden_states"]
        hidden = next((value for value in [*args, *kwargs.values()] if is_hidden(value, axes)), None)
        if hidden is not None:
            return hidden
    return None


def marked(call: Arguments, given: Mapping[int, Given], boards: frozenset[str]) -> Arguments:
    """A call with marks for the hidden states, for those of earlier blocks (by id) and for boards."""
    args, kwargs = call
    hidden = hidden_of(args, kwargs)

    def mark(value: Any) -> Any:
        if value is hidden:
            return HIDDEN
        return given.get(id(value), value) if isinstance(value, torch.Tensor) else value

    kwargs = {name: Board(name, copy.copy(v)) if name in boards else v for name, v in kwargs.items()}
    return pytree.tree_map(mark, (args, kwargs))


def marks_in(arguments: Sequence[Arguments]) -> dict[Given, int]:
    """Every tensor that a block takes from an earlier one, with the last block that does."""
    return {
        leaf: index
        for index, call in enumerate(arguments)
        for leaf in pytree.tree_leaves(call)
        if isinstance(leaf, Given)
    }


def written_boards(before: Arguments, contents: Mapping[str, Mapping[Any, Any]]) -> set[str]:
    """The named arguments of a call that hold other things now than `contents`, which was taken before the call."""
    now = board_contents(before)
    return {
        name
        for name, old in contents.items()
        if old.keys() != now[name].keys() or any(old[key] is not now[name][key] for key in old)
    }


def board_contents(call: Arguments) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in call[1].items() if isinstance(value, MutableMapping)}
