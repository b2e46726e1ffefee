"""Replaces the `forward` of modules temporarily."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def patched(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Within the block each module runs the forward given with it; afterwards the old one is restored. The pairs are
    taken one by one, so a forward may be made from the module's present one. Blocks may be nested."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, previous in reversed(before):
            if previous is None:
                del module.forward
            else:
                module.forward = previous


def without_weights(forward: Forward) -> Forward:
    """Marks a replacement forward that uses none of the module's weights."""
    forward.without_weights = True  # type: ignore[attr-defined]
    return forward


def needs_no_weights(module: nn.Module) -> bool:
    """Whether the module's present forward is marked `without_weights`."""
    return getattr(vars(module).get("forward"), "without_weights", False)


def has_own_forward(module: nn.Module) -> bool:
    """Whether neither we nor accelerate's hooks have replaced the module's forward."""
    return "forward" not in vars(module) and not hasattr(module, "_hf_hook")


def with_globals(
    function: types.FunctionType, names: dict[str, Any]
) -> types.FunctionType:
    """A copy of a function with other values for these module-level names; its module is not changed."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
