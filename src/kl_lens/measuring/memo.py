"""Records outputs of a block's parts in the teacher's run, so that a perturbed block runs only what differs.

A candidate changes one weight. Parts of its block that come before it, or beside it (the attention next to a
state-space mixer), get the teacher's inputs and give the teacher's outputs. No table says which parts those are: a
part without a perturbed weight that is called with exactly the recorded inputs returns the recorded output; any other
call runs. On a GPU inputs count as equal only if they are the same tensor: comparing values would make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kl_lens.model.patching import patched

# Immutable arguments: a call cannot return anything through them.
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)

Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class _Call:
    """One call of a part: its flattened arguments, their structure, and what it returned."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    output: Any

    def matches(self, leaves: list[Any], structure: pytree.TreeSpec, by_value: bool) -> bool:
        pairs = zip(self.leaves, leaves, strict=True)
        return structure == self.structure and all(_same(*pair, by_value=by_value) for pair in pairs)


def _same(recorded: Any, given: Any, *, by_value: bool = True) -> bool:
    if recorded is given or type(recorded) is not type(given):
        return recorded is given
    if not isinstance(recorded, torch.Tensor):
        return bool(recorded == given)
    return by_value and recorded.dtype == given.dtype and torch.equal(recorded, given)


def _is_plain(tree: Any) -> bool:
    """Only tensors and plain values: no cache or other object that a call could change as a side effect."""
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
        ...     other = block(states)                  # in_proj and what depends only on it do not run again
    """

    def __init__(self, block: nn.Module) -> None:
        self._by_value = all(parameter.device.type == "cpu" for parameter in block.parameters())
        # Parts worth remembering hold a matrix; norms and activations are cheaper than comparing their inputs. Where
        # inputs are compared by identity, norms are recorded too: parts behind them must get the same tensor again.
        least = 2 if self._by_value else 1
        self._parts = {
            name: part
            for name, part in block.named_modules()
            if name and any(parameter.dim() >= least for parameter in part.parameters())
        }
        self._calls: dict[str, list[_Call]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the recorded tensors."""
        storages = {}
        for calls in self._calls.values():
            for leaf in pytree.tree_leaves([(call.leaves, call.output) for call in calls]):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the calls within, except those whose inputs or outputs were changed in place before the end."""
        seen: list[tuple[str, _Call, list[Any]]] = []

        def record(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                before = [_copied(leaf) for leaf in leaves]
                output = forward(*args, **kwargs)
                left, shape = pytree.tree_flatten((args, kwargs))
                # A call that also fills a dictionary argument has a side effect: it must run again.
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
        """Within, parts without a perturbed parameter (given by id) return recorded outputs for recorded calls."""
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
    """Wraps the parts' current `forward` (ours or the library's)."""
    return patched((part, wrap(name, part.forward)) for name, part in parts.items())
