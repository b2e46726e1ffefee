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
    share, caches = target.footprint(quantized=quantized), []
    for kind in CACHES:
        numbers = getattr(carried, kind) * use.batch * use.context
        default, *others = target.cache_formats or (FP16,)
        bits = {default: 16.0 if target.cache_formats else share.cache_bits}
        losses = {default: 0.0}
        for name in others:
            if (loss := _loss(kind, name, table)) is not None:
                bits[name], losses[name] = StateFormat.parse(name, kind).bits((1, 64)), loss
        choices = [Choice(math.ceil(numbers * bits[n] / 8), losses[n], 0.0, Recipe(n)) for n in bits]
        if numbers:
            caches.append(Group((kind,), tuple(choices)))
    held = Held(share.bytes(carried, use), 4 * carried.states * use.batch, tuple(caches))
    file = max(0, memory - held.bytes({})) / share.copies
    return replace(held, runtime=held.runtime + math.ceil((share.copies - 1) * file))


def _loss(kind: str, name: str, table: SensitivityTable | None) -> float | None:
    """The sum over all blocks; None if one was not measured."""
    if table is None:
        return None
    names = {component.name for component in table.components if component.kind == kind}
    kls = [m.metrics[KL].value for m in table.measurements if m.component in names and m.format == name]
    return math.fsum(max(0.0, kl) for kl in kls) if len(kls) == len(names) else None
