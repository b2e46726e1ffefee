"""What a device has to hold for a file: the runtime's own share, recurrent states, and caches, which have choices."""

from __future__ import annotations

import math
from dataclasses import replace

from kl_lens.model.carried import Carried
from kl_lens.model.states import CACHES, StateFormat
from kl_lens.planning.problem import Choice, Group, Held
from kl_lens.run.records import SensitivityTable
from kl_lens.run.samples import KL
from kl_lens.targets.base import Target, Usage
from kl_lens.weights.recipes import FP16, Recipe


def held_by(
    target: Target,
    carried: Carried,
    use: Usage,
    table: SensitivityTable | None = None,
    memory: int = 0,
    *,
    quantized: bool = True,
) -> Held:
    """What is held beside a file. `memory`: all that there is; then the runtime's share includes its copies of the
    largest file for which that suffices. `table`: what caches lose in other formats than the default; without it there
    is no choice. `quantized`: whether the file's weights are."""
    share = target.footprint(quantized=quantized)
    caches = []
    for kind in CACHES:
        if not (numbers := getattr(carried, kind) * use.batch * use.context):
            continue
        default, *others = target.cache_formats or (FP16,)
        usual_bits = StateFormat.parse(default, kind).numbers.bits
        usual = numbers * (usual_bits if target.cache_formats else share.cache_bits) // 8
        choices = [Choice(usual, 0.0, 0.0, Recipe(default))]
        for name in others:
            if measured := _measured(kind, name, table):
                bits, loss = measured
                choices.append(
                    Choice(math.ceil(numbers * bits / 8), loss, 0.0, Recipe(name))
                )
        caches.append(Group((kind,), tuple(choices)))
    held = Held(share.bytes(carried, use), 4 * carried.states * use.batch, tuple(caches))
    file = max(0, memory - held.bytes({})) / share.copies
    return replace(held, runtime=held.runtime + math.ceil((share.copies - 1) * file))


def _measured(
    kind: str, name: str, table: SensitivityTable | None
) -> tuple[float, float] | None:
    """Bits per number and the loss of all blocks; None if one was not measured."""
    parts = {c.name: c.shape for c in table.components if c.kind == kind} if table else {}
    found = (
        [m for m in table.measurements if m.component in parts and m.format == name]
        if table
        else []
    )
    if not found or len(found) < len(parts):
        return None
    numbers = [math.prod(shape) for shape in parts.values()]
    how = StateFormat.parse(name, kind)
    bits = sum(
        n * how.bits(shape) for n, shape in zip(numbers, parts.values(), strict=True)
    ) / sum(numbers)
    return bits, math.fsum(max(0.0, m.metrics[KL].value) for m in found)
