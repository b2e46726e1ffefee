"""Finds the blocks of a model by watching one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from kl_lens.base.errors import CheckpointError
from kl_lens.model.linking import Arguments, hidden_of


def find_blocks(
    model: nn.Module, forward: Callable[[], Any], kinds: tuple[type[nn.Module], ...], head: nn.Module
) -> tuple[str, Sequence[nn.Module]]:
    """The list with the most parameters whose members run once each, in order, before the head."""
    lists: list[tuple[str, Any]] = [
        (name, m) for name, m in model.named_modules() if isinstance(m, kinds) and head not in m.modules()
    ]
    order: list[tuple[int, int]] = []
    with ExitStack() as hooks:
        for number, (_, members) in enumerate(lists):
            for index, member in enumerate(members):
                hook = lambda *_, number=number, index=index: order.append((number, index))  # noqa: E731
                hooks.enter_context(member.register_forward_pre_hook(hook))
        forward()
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
            "KL Lens needs a model of the form embedding → blocks → norm → head"
        )
    name, members = lists[best[1]]
    return name, list(members)


def check_linked(model: nn.Module, name: str, calls: list[Arguments], outputs: list[Any]) -> None:
    """Raises if a block does not take exactly the output of the one before: then it could not be run alone."""
    for index, (call, output) in enumerate(zip(calls[1:], outputs[:-1], strict=True)):
        given = output[0] if isinstance(output, (tuple, list)) else output
        taken = hidden_of(*call)
        if taken is not None and taken.shape == given.shape and torch.equal(taken, given):
            continue
        config = getattr(model, "config", None)
        hint = (
            "; it rescales them for half precision (rescale_every): open it in float32"
            if getattr(config, "rescale_every", 0)
            else ""
        )
        raise CheckpointError(
            f"{name}.{index + 1} does not take the output of {name}.{index}: {type(model).__name__} changes the hidden "
            f"states between blocks, so KL Lens cannot run its blocks in parts{hint}"
        )
