"""What the parts of a block gave in the teacher's run, so that a perturbed block runs only what differs.

A candidate changes one weight. Parts of its block that come before it, or beside it (the attention next to a
state-space mixer), get the teacher's inputs and give the teacher's outputs. Which parts those are is not looked up
but seen: a part that holds no perturbed weight and is called with exactly the recorded inputs gives the recorded
output; any other call runs. On a GPU only the very same tensors count: to compare others, the host would have to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kl_lens.checkpoints.patching import patched

# Arguments that are values, and cannot carry something away from a call.
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)

Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class _Call:
    """One call of a part: its flattened arguments, their structure, and what it returned."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    output: Any

    def matches(self, leaves: list[Any], structure: pytree.TreeSpec, by_value: bool) -> bool:
        same = _same if by_value else _identical
        return structure == self.structure and all(map(same, self.leaves, leaves))


def _same(recorded: Any, given: Any) -> bool:
    if isinstance(recorded, torch.Tensor):
        if recorded is given:
            return True
        return (
            isinstance(given, torch.Tensor)
            and recorded.dtype == given.dtype
            and recorded.shape == given.shape
            and torch.equal(recorded, given)
        )
    return type(recorded) is type(given) and bool(recorded == given)


def _identical(recorded: Any, given: Any) -> bool:
    return recorded is given if isinstance(recorded, torch.Tensor) else _same(recorded, given)


def _is_plain(tree: Any) -> bool:
    """Nothing but tensors and values: no cache or other object that a call could change on the side."""
    return all(isinstance(leaf, (torch.Tensor, *_VALUES)) for leaf in pytree.tree_leaves(tree))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class BlockMemo:
    """The recorded calls of one block's parts on one batch.

    Example:
        >>> memo = BlockMemo(block)
        >>> with memo.recording():
        ...     hidden = block(states)
        >>> with memo.replaying(perturbed={id(block.mixer.out_proj.weight)}):
        ...     other = block(states)                  # in_proj and what only it feeds are not computed again
    """

    def __init__(self, block: nn.Module) -> None:
        self._by_value = all(parameter.device.type == "cpu" for parameter in block.parameters())
        # Parts worth remembering hold a matrix; norms and activations are cheaper than comparing their inputs. Where
        # tensors are told by identity, what a norm gave has to be the same tensor again for the parts behind it.
        least = 2 if self._by_value else 1
        self._parts = {
            name: part
            for name, part in block.named_modules()
            if name and any(parameter.dim() >= least for parameter in part.parameters())
        }
        self._calls: dict[str, list[_Call]] = {}

    @property
    def bytes(self) -> int:
        """What keeping the recorded tensors costs."""
        storages = {}
        for calls in self._calls.values():
            for leaf in pytree.tree_leaves([(call.leaves, call.output) for call in calls]):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls within are kept, unless what went in or came out was changed in place before the end."""
        seen: list[tuple[str, _Call, list[Any]]] = []

        def record(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                before = [_copied(leaf) for leaf in leaves]
                output = forward(*args, **kwargs)
                left, shape = pytree.tree_flatten((args, kwargs))
                # A call that fills a dictionary it was given does more than return its output: it must run again.
                untouched = shape == structure and all(a is b for a, b in zip(leaves, left, strict=True))
                if untouched and _is_plain(leaves) and _is_plain(output):
                    after = [_copied(leaf) for leaf in pytree.tree_leaves(output)]
                    seen.append((name, _Call(tuple(leaves), structure, output), before + after))
                return output

            return run

        with _wrapped(self._parts, record):
            yield
        for name, call, copies in seen:
            now = [*call.leaves, *pytree.tree_leaves(call.output)]
            if all(map(_same, copies, now)):
                self._calls.setdefault(name, []).append(call)

    @contextmanager
    def replaying(self, perturbed: set[int]) -> Iterator[None]:
        """Within, parts without a perturbed parameter (given by id) answer recorded calls from memory."""
        clean = {
            name: self._parts[name]
            for name in self._calls
            if not any(id(parameter) in perturbed for parameter in self._parts[name].parameters())
        }

        def replay(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                for call in self._calls[name]:
                    if call.matches(leaves, structure, self._by_value):
                        return call.output
                return forward(*args, **kwargs)

            return run

        with _wrapped(clean, replay):
            yield


def _wrapped(parts: dict[str, nn.Module], wrap: Wrapper) -> AbstractContextManager[None]:
    """The parts' `forward`, as it is now (ours or the library's), behind a wrapper."""
    return patched((part, wrap(name, part.forward)) for name, part in parts.items())
