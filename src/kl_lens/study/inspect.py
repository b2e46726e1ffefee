"""`inspect`: a model's components and their bytes at each precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kl_lens.base.errors import KLLensError
from kl_lens.model import LoadedModel
from kl_lens.model.carried import Carried, carried_from
from kl_lens.run.records import Component
from kl_lens.study import settings as of
from kl_lens.study.memory import held_by
from kl_lens.study.run.stages import Sketched, sketched
from kl_lens.study.session import Session
from kl_lens.study.settings import Limits, Opening, Settings, group, option, with_options
from kl_lens.targets import TARGETS, Target, describe_target, menu_of
from kl_lens.targets.abilities import Usage
from kl_lens.weights.formats import FP16, get_format
from kl_lens.weights.recipes import Recipe, fitting_recipe

PRECISIONS = (FP16, "int8", "int4")


@with_options
class InspectSettings(Settings):
    model: of.Model = of.of_model()
    opening: Opening = group(Opening, weights=None, working_memory=None)
    memory: of.Size | None = option(
        None, "say what fits into this memory, as 8GB; reads only the configuration"
    )
    context: of.Context | None = option(
        None, "with --memory: tokens of each sequence, as 32k (default: 4096)"
    )
    batch: of.Count | None = option(None, "with --memory: sequences at once (default: 1)")

    max_bytes: of.Size | None = option(
        None,
        "say which runtimes' files can be this small, as 12GB; reads only the configuration",
    )

    @property
    def limits(self) -> Limits:
        return Limits(
            memory=self.memory,
            context=self.context,
            batch=self.batch,
            max_bytes=self.max_bytes,
        )

    def check(self) -> None:
        super().check()
        self.limits.check()
        if self.memory and self.max_bytes:
            raise KLLensError("give --memory or --max-bytes, not both")


@dataclass(frozen=True)
class Fit:
    """The bytes that a model needs in one runtime, with weights in one format and the runtime's own caches."""

    target: str
    format: str
    file: int
    states: int
    caches: int
    runtime: int

    @property
    def total(self) -> int:
        return self.file + self.states + self.caches + self.runtime


@dataclass(frozen=True)
class FitResult:
    model: str
    memory: int
    use: Usage
    rows: list[Fit]
    # A file that fits; None if there is none, or its runtime is not installed.
    making: Sketched | None


def fits(settings: InspectSettings, carried: Carried) -> FitResult:
    """From the configuration: no weights are read."""
    use = Usage(settings.context or Usage.context, settings.batch or Usage.batch)
    rows = []
    for target in (
        target for target in map(describe_target, TARGETS) if target.footprint().process
    ):
        for name in (
            FP16,
            *dict.fromkeys(recipe.grid.name for recipe in reversed(target.short_menu)),
        ):
            size = smallest(target, carried, [Recipe(name)])
            held = held_by(target, carried, use, quantized=name != FP16)
            caches = held.bytes({}) - held.fixed
            runtime = held.runtime + int(
                (target.footprint(quantized=name != FP16).copies - 1) * size
            )
            rows.append(Fit(target.name, name, size, held.states, caches, runtime))
    memory = settings.memory or 0
    made = [
        row.target
        for row in rows
        if row.total <= memory
        and not describe_target(row.target).lacks()
        and not describe_target(row.target).unsupported(carried.model_type)
    ]
    making = sketched(settings.model, carried, made[0]) if made else None
    return FitResult(settings.model, memory, use, rows, making)


@dataclass(frozen=True)
class Reach:
    """The smallest file of a runtime with the formats of one of its menus."""

    target: str
    menu: str
    formats: tuple[str, ...]
    bytes: int
    bits_per_weight: float


@dataclass(frozen=True)
class ReachResult:
    model: str
    max_bytes: int
    rows: list[Reach]


def smallest(target: Target, carried: Carried, recipes: Sequence[Recipe]) -> int:
    """Bytes of all weights, each matrix in what it gets for the smallest of these recipes; without a file's header."""
    size = 4 * carried.vectors
    for shape, count in Counter(carried.matrices).items():
        stored = {fitting_recipe(recipe, shape)[0].grid for recipe in recipes}
        sizes = (fmt.bytes(shape) for fmt in stored if not target.holds(fmt, shape))
        size += count * min([2 * math.prod(shape), *sizes])
    return size


def reaches(model: str, max_bytes: int, carried: Carried) -> ReachResult:
    """From the configuration: no weights are read."""
    weights = carried.vectors + sum(map(math.prod, carried.matrices))
    rows = []
    for target in map(describe_target, TARGETS):
        if target.unsupported(carried.model_type):
            continue
        for menu in ("short", "small") if target.small_formats else ("short",):
            recipes = menu_of(target, set(carried.matrices), small=menu == "small")
            size = smallest(target, carried, recipes)
            formats = tuple(recipe.grid.name for recipe in recipes)
            rows.append(Reach(target.name, menu, formats, size, 8 * size / weights))
    return ReachResult(model, max_bytes, rows)


Inspected = LoadedModel | FitResult | ReachResult


def bytes_of(*components: Component) -> dict[str, int]:
    """At each precision. Counts weights that are not quantized as FP16; a target may keep them in FP32."""
    return {
        precision: sum(
            get_format(precision).bytes(c.shape)
            if c.quantizable and precision != FP16
            else 2 * c.parameters
            for c in components
        )
        for precision in PRECISIONS
    }


def inspect(settings: InspectSettings, session: Session) -> Inspected:
    if settings.max_bytes is None and settings.memory is None:
        return session.model(settings.model, settings.opening)
    carried = carried_from(
        settings.model, trust_remote_code=settings.opening.trust_remote_code
    )
    if settings.max_bytes is not None:
        return reaches(settings.model, settings.max_bytes, carried)
    return fits(settings, carried)
