"""The one way to give modules another `forward` for a while."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def patched(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Within the block each module runs the forward beside it; what it had before comes back whatever happens.

    The pairs are taken one by one, so a forward may be made from the module's present one. Blocks nest: the inner one
    gives back what the outer one put there.
    """
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in reversed(before):
            if own is None:
                del module.forward
            else:
                module.forward = own


def without_weights(forward: Forward) -> Forward:
    """Marks a forward that stands in for a module's own and computes with none of its weights."""
    forward.without_weights = True  # type: ignore[attr-defined]
    return forward


def needs_no_weights(module: nn.Module) -> bool:
    """The forward that the module has now is marked so."""
    return getattr(vars(module).get("forward"), "without_weights", False)


def has_own_forward(module: nn.Module) -> bool:
    """Nobody else (us, or accelerate's hooks) has put something in the place of the module's forward."""
    return "forward" not in vars(module) and not hasattr(module, "_hf_hook")


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """A copy of a function in which these module-level names stand for something else; its module is not touched."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
