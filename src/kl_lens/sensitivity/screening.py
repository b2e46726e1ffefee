"""Predicts what candidates lose, so that most of them need not be measured.

A component's KL is nearly proportional to the error of its own outputs: KL ≈ f · E, E = tr(ΔW Σ ΔWᵀ), with one f per
component. E is cheap: a few rows show it, because quantizers treat rows independently. f comes from one format per
component, the anchor, rounded to nearest and measured on few windows. Where a runtime rounds activations too, recipes with many bits lose more
than their weights explain. How much depends on the kind of component: one pilot of each kind is measured in every
recipe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kl_lens.checkpoints import LoadedModel
from kl_lens.recipes import Recipe
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.pieces import key_of

SMALL_MENU = 3  # with so few recipes, everything is measured
ROWS = 16  # of each matrix that show a recipe's error
ALIKE = 4  # components of a kind that are worth a pilot
WINDOWS = 8  # one of so many windows is used for anchors and pilots

Key = tuple[str, Recipe]  # component and recipe


def is_worth_it(candidates: Sequence[Candidate]) -> bool:
    """Whether any component has a large menu."""
    counts: dict[str, int] = {}
    for candidate in candidates:
        counts[candidate.component.name] = counts.get(candidate.component.name, 0) + 1
    return max(counts.values()) > SMALL_MENU


def output_errors(
    model: LoadedModel, candidates: Sequence[Candidate], advanced: Callable[[Candidate], None]
) -> dict[Key, float]:
    """The error of each component's own outputs in each recipe and in its anchor, from a few rows."""
    errors = {}
    for candidate in sorted({*candidates, *anchors(candidates).values()}, key=lambda c: c.component.name):
        name, recipe = key_of(candidate)
        errors[name, recipe] = model.weights.output_error(name, recipe, ROWS)
        advanced(candidate)
    return errors


def anchors(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """Component → the format in the middle of its menu, rounded to nearest."""
    found = {}
    for name, menu in _menus(candidates).items():
        middle = menu[(len(menu) - 1) // 2]
        found[name] = replace(middle, recipe=Recipe(middle.recipe.grid.name))
    return found


def _menus(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Each component's candidates, from the smallest to the largest."""
    menus: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        menus.setdefault(candidate.component.name, []).append(candidate)
    return {
        name: sorted(menu, key=lambda c: c.recipe.grid.bytes(c.component.shape))
        for name, menu in menus.items()
    }


@dataclass(frozen=True)
class Screen:
    candidates: Sequence[Candidate]
    errors: Mapping[Key, float]

    @cached_property
    def _menus(self) -> dict[str, list[Candidate]]:
        return _menus(self.candidates)

    @cached_property
    def _anchors(self) -> dict[str, Candidate]:
        return anchors(self.candidates)

    @cached_property
    def _pilots(self) -> dict[str, str]:
        """Kind → the component in the middle of its kind, for kinds with many members."""
        kinds: dict[str, list[str]] = {}
        for name, anchor in self._anchors.items():
            kinds.setdefault(anchor.component.kind, []).append(name)
        return {kind: names[len(names) // 2] for kind, names in kinds.items() if len(names) >= ALIKE}

    @property
    def first(self) -> list[Candidate]:
        """What has to be measured before anything can be predicted, in network order."""
        pilots = set(self._pilots.values())
        wanted = {
            c: None for name, a in self._anchors.items() for c in (a, *self._menus[name] * (name in pilots))
        }
        return list(wanted)

    def predicted(self, first: Mapping[Key, float], measured: Mapping[Key, float]) -> dict[Key, float]:
        """The KL of every candidate: measured, or predicted from `first` (few windows) and corrected by what was
        measured of the same component."""
        rates = {key: max(kl, 0.0) / self.errors[key] for key, kl in first.items() if self.errors[key] > 0}
        beyond = self._beyond_weights(rates)
        raw: dict[Key, float] = {}
        for name, menu in self._menus.items():
            anchor = key_of(self._anchors[name])
            kind = self._anchors[name].component.kind
            own = rates.get(anchor, 0.0) / beyond(kind, anchor[1])
            for key in map(key_of, menu):
                raw[key] = own * beyond(kind, key[1]) * self.errors[key]
        usual = _median([measured[key] / raw[key] for key in measured if raw[key] > 0])
        found: dict[Key, float] = {}
        for menu in self._menus.values():
            keys = [*map(key_of, menu)]
            known = [key for key in keys if key in measured and raw[key] > 0 and measured[key] > 0]
            for key in keys:
                nearest = min(
                    known,
                    key=lambda k: abs(math.log(raw[k] / raw[key])) if raw[key] > 0 else 0.0,
                    default=None,
                )
                correction = usual if nearest is None else measured[nearest] / raw[nearest]
                found[key] = measured.get(key, raw[key] * correction)
        return found

    def _beyond_weights(self, rates: Mapping[Key, float]) -> Callable[[str, Recipe], float]:
        """(kind, recipe) → how much more a recipe loses per error of its outputs than the pilot's anchor does."""
        known: dict[tuple[str, Recipe], float] = {}
        for kind, name in self._pilots.items():
            base = rates.get(key_of(self._anchors[name]), 0.0)
            if base > 0:
                known |= {
                    (kind, c.recipe): rates.get(key_of(c), 0.0) / base or 1.0 for c in self._menus[name]
                }
        usual = {r: _median([v for (_, each), v in known.items() if each == r]) for _, r in known}
        return lambda kind, recipe: known.get((kind, recipe), usual.get(recipe, 1.0))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 1.0
