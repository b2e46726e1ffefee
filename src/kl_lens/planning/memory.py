"""What a device has to hold for a file: the runtime's own share, recurrent states, and caches, which have choices."""

from __future__ import annotations

import math

from kl_lens.model.carried import Carried
from kl_lens.model.states import CACHES, StateFormat
from kl_lens.planning.problem import Choice, Group, Held
from kl_lens.run.records import SensitivityTable
from kl_lens.targets.base import Target, Usage
from kl_lens.weights.recipes import Recipe

KL = "kl_teacher_to_student"


def held_by(target: Target, carried: Carried, use: Usage, table: SensitivityTable | None = None) -> Held:
    """`table`: what caches lose in other formats than the default; without one, there is no choice."""
    caches = []
    for kind in CACHES:
        numbers = getattr(carried, kind) * use.batch * use.context
        names = target.cache_formats or ("fp16",)
        losses = {name: _loss(kind, name, table) for name in names[1:]}
        kept = {names[0]: 0.0} | {name: loss for name, loss in losses.items() if loss is not None}
        choices = [
            Choice(
                math.ceil(numbers * StateFormat.parse(name, kind).bits((1, 64)) / 8), loss, 0.0, Recipe(name)
            )
            for name, loss in kept.items()
        ]
        if numbers:
            caches.append(Group((kind,), tuple(choices)))
    share = target.footprint.bytes(carried, use)
    return Held(share, 4 * carried.states * use.batch, tuple(caches))


def _loss(kind: str, name: str, table: SensitivityTable | None) -> float | None:
    """The sum over all blocks; None if one was not measured."""
    names = {component.name for component in table.components if component.kind == kind} if table else set()
    rows = [m for m in table.measurements if m.component in names and m.format == name] if table else []
    return (
        math.fsum(max(0.0, m.metrics[KL].value) for m in rows) if rows and len(rows) == len(names) else None
    )
