"""What a device has to hold for a file: the runtime's own share, recurrent states, and caches, which have choices."""

from __future__ import annotations

import math
from dataclasses import replace

from kl_lens.model.carried import Carried
from kl_lens.model.states import StateFormat
from kl_lens.planning.problem import Choice, Group, Held
from kl_lens.run.readings import KL
from kl_lens.run.records import CACHES, SensitivityTable
from kl_lens.targets.abilities import Target, Usage
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
        default, *smaller = target.cache_formats or (FP16,)
        usual_bits = StateFormat.parse(default, kind).numbers.bits
        usual = numbers * (usual_bits if target.cache_formats else share.cache_bits) // 8
        choices = [Choice(usual, 0.0, 0.0, Recipe(default))]
        for name in smaller:
            if measured := _measured(kind, name, table):
                size = math.ceil(numbers * measured[0] / 8)
                choices.append(Choice(size, measured[1], 0.0, Recipe(name)))
        caches.append(Group((kind,), tuple(choices)))
    beside = Held(
        share.bytes(carried, use), 4 * carried.states * use.batch, tuple(caches)
    )
    file = max(0, memory - beside.bytes({})) / share.copies
    copies = math.ceil((share.copies - 1) * file)
    return replace(beside, runtime=beside.runtime + copies)


def _measured(
    kind: str, name: str, table: SensitivityTable | None
) -> tuple[float, float] | None:
    """Bits per number and the loss of all blocks; None if one was not measured."""
    if table is None:
        return None
    shapes = {c.name: c.shape for c in table.components if c.kind == kind}
    losses = [
        max(0.0, m.metrics[KL].value)
        for m in table.measurements
        if m.component in shapes and m.format == name
    ]
    if not losses or len(losses) < len(shapes):
        return None
    fmt = StateFormat.parse(name, kind)
    bits = sum(math.prod(shape) * fmt.bits(shape) for shape in shapes.values())
    return bits / sum(map(math.prod, shapes.values())), math.fsum(losses)
