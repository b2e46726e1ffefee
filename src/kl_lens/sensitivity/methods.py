"""Which recipes a sweep measures: formats × methods, or for each component the method with the least output error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kl_lens.checkpoints import LoadedModel
from kl_lens.formats import get_format
from kl_lens.quantizers import get_quantizer, known_quantizers
from kl_lens.recipes import NEAREST, Recipe
from kl_lens.records import Measurement
from kl_lens.sensitivity.perturbation import Candidate

AUTO = "auto"
VERIFIED = 4  # components on which `auto` measures every method
_KL = "kl_teacher_to_student"


def crossed(formats: Sequence[str], methods: Sequence[str]) -> tuple[list[Recipe], list[str]]:
    """Every format with every method that applies to it, and the reasons why others are left out.

    A recipe that names its method stays as it is, and so does a format that no method suits (fp16).
    """
    recipes: list[Recipe] = []
    reasons: list[str] = []
    for name in formats:
        if "+" in name or not methods:
            recipes.append(Recipe.parse(name))
            continue
        fmt = get_format(name)
        unsuited = {method: get_quantizer(method).suits(fmt) for method in methods}
        reasons += [f"{name}+{method}: {reason}" for method, reason in unsuited.items() if reason]
        suited = [method for method, reason in unsuited.items() if reason is None]
        recipes += [Recipe.parse(f"{name}+{method}") for method in suited or [NEAREST]]
    return list(dict.fromkeys(recipes)), reasons


def all_methods(formats: Sequence[str]) -> list[Recipe]:
    """Every format with every method, round to nearest first."""
    return crossed(formats, of_single_components())[0]


def of_single_components() -> list[str]:
    """The methods that work on one component without a plan."""
    return [name for name in known_quantizers() if not get_quantizer(name).of_a_plan]


@dataclass(frozen=True)
class MethodChoice:
    """What `auto` measures: for each component and format the recipe with the least error of the component's own
    outputs, and on a few components every recipe, to check that choice against KL."""

    candidates: list[Candidate]
    chosen: frozenset[tuple[str, Recipe]]  # by component
    verified: frozenset[str]  # components

    @property
    def summary(self) -> str:
        counts: dict[str, int] = {}
        for _, recipe in self.chosen:
            counts[recipe.method] = counts.get(recipe.method, 0) + 1
        return ", ".join(
            f"{method} for {count}" for method, count in sorted(counts.items(), key=lambda x: -x[1])
        )

    def agreement(self, measurements: Iterable[Measurement]) -> tuple[int, int]:
        """Verified (component, format) pairs where the choice also had the least KL, and all verified pairs."""
        rivals_of: dict[tuple[str, str], list[tuple[float, bool]]] = {}
        offered = {(c.component.name, c.recipe) for c in self.candidates}
        for m in measurements:
            if m.component in self.verified and (m.component, m.format) in offered:
                key = m.component, Recipe.parse(m.format).grid.name
                rivals_of.setdefault(key, []).append(
                    (m.metrics[_KL].value, (m.component, m.format) in self.chosen)
                )
        rivals = [values for values in rivals_of.values() if len(values) > 1]
        return sum(any(won for value, won in v if value == min(v)[0]) for v in rivals), len(rivals)


def by_output_error(
    model: LoadedModel, candidates: Sequence[Candidate], advanced: Callable[[Candidate], None]
) -> MethodChoice:
    """Chooses among candidates that differ only in their method. Every weight is quantized, and kept by the store."""
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        key = candidate.component.name, candidate.recipe.grid.name
        groups.setdefault(key, []).append(candidate)
    chosen: set[tuple[str, Recipe]] = set()
    for (name, _), rivals in groups.items():
        errors: list[float] = []
        for rival in rivals:
            errors.append(model.weights.output_error(name, rival.recipe) if len(rivals) > 1 else 0.0)
            advanced(rival)
        chosen.add((name, rivals[errors.index(min(errors))].recipe))
    names = list(dict.fromkeys(c.component.name for c in candidates))
    step = max(1, len(names) // VERIFIED)
    verified = frozenset(names[step // 2 :: step][:VERIFIED])
    kept = [c for c in candidates if c.component.name in verified or (c.component.name, c.recipe) in chosen]
    return MethodChoice(kept, frozenset(chosen), verified)
