"""Predicts what candidates lose, so that most of them need not be measured.

A component's KL is nearly proportional to the error of its own outputs: KL ≈ f · E, E = tr(ΔW Σ ΔWᵀ), with one f per
component. E is cheap: a few rows show it, because quantizers treat rows independently. f comes from one format per
component, the anchor: without error feedback (ggml's types with importance, which a GPU can search; others rounded to
nearest), measured on few windows. In a deep model, some components of a kind show how its recipes compare with the
anchor.

What differs from that comes with a recipe (a runtime that rounds activations adds an error which more bits do not make
smaller) or with a component. So later measurements give a factor of each kind and recipe, and one of each component.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from kl_lens.measuring.perturbation import Candidate, key_of
from kl_lens.measuring.second_order import Key, gradient_work
from kl_lens.measuring.sweep import error_work, quantizing_work, work_of
from kl_lens.model import LoadedModel
from kl_lens.weights.recipes import preferred

SMALL_MENU = 3  # with so few recipes, everything is measured
SMALL_WITH_GRADIENTS = 2
ROWS = 16  # of each matrix that show a recipe's error
TOLERANCE = 0.15  # of predictions
ALIKE = (
    8  # components of a kind that show how a recipe's error compares with the anchor's
)
PART = 8  # anchors are measured on one of so many parts of the text
MEASURED = 1.3  # candidates per component, for forecasts; benchmarks/staged.py
SMALL_PART = 0.03  # of a plan's KL for which predictions are good enough

Name = TypeVar("Name", bound=Hashable)


def few_of(windows: int) -> int:
    """The windows that anchors are measured on."""
    return max(1, windows // PART)


def is_worth_it(
    candidates: Sequence[Candidate], *, with_a_limit: bool, gradients: bool = False
) -> bool:
    """Whether a component has a large menu and, without a limit on plans, several methods for one format."""
    names = [candidate.component.name for candidate in candidates]
    formats = {
        (candidate.component.name, candidate.recipe.grid.name) for candidate in candidates
    }
    small = SMALL_WITH_GRADIENTS if gradients else SMALL_MENU
    large = max(map(names.count, set(names))) > small
    return large and (with_a_limit or len(formats) < len(candidates))


def deciding(choices: Mapping[Key, float]) -> list[Key]:
    """The choices of a plan with the largest KL; the others add up to a small part of it."""
    allowed = SMALL_PART * sum(choices.values())
    kept = []
    for key, value in sorted(choices.items(), key=lambda item: item[1]):
        allowed -= value
        if allowed < 0:
            kept.append(key)
    return kept


def output_errors(
    model: LoadedModel, screen: Screen, advanced: Callable[[Candidate], None]
) -> dict[Key, float]:
    """The error of each component's own outputs in each recipe, from a few rows."""
    errors = {}
    for candidate in screen.needed:
        name, recipe = key_of(candidate)
        errors[name, recipe] = model.weights.output_error(name, recipe, ROWS)
        advanced(candidate)
    return screen.completed(errors)


@dataclass(frozen=True)
class Screen:
    candidates: Sequence[Candidate]

    @cached_property
    def _anchors(self) -> dict[str, Candidate]:
        """Component → the middle of its formats, without error feedback."""
        menus: dict[str, dict[Candidate, None]] = {}
        for candidate in self.candidates:
            plain = Candidate(
                candidate.component, preferred(candidate.recipe.grid.name, ("imatrix",))
            )
            menus.setdefault(candidate.component.name, {})[plain] = None
        return {
            name: sorted(menu, key=_size)[(len(menu) - 1) // 2]
            for name, menu in menus.items()
        }

    @property
    def first(self) -> list[Candidate]:
        """What has to be measured before anything can be predicted, in network order."""
        return [*self._anchors.values()]

    @cached_property
    def _alike(self) -> dict[Hashable, list[Candidate]]:
        """Candidates of one kind, recipe and anchor."""
        alike: dict[Hashable, list[Candidate]] = {}
        for candidate in self.candidates:
            component = candidate.component
            anchor = self._anchors[candidate.component.name].recipe
            alike.setdefault(
                (component.kind, component.family, anchor, candidate.recipe), []
            ).append(candidate)
        return alike

    @property
    def needed(self) -> list[Candidate]:
        """What has to be quantized, component by component."""
        order = {name: index for index, name in enumerate(self._anchors)}
        sampled = (
            group[index * (len(group) - 1) // (ALIKE - 1)]
            for group in self._alike.values()
            for index in range(ALIKE)
        )
        return sorted(
            dict.fromkeys((*sampled, *self.first)), key=lambda c: order[c.component.name]
        )

    def gradients_cost_less(self, model: LoadedModel, windows: int) -> bool:
        """Than measuring `first`."""
        return gradient_work(model) < self._first_work(model, windows)

    def _first_work(self, model: LoadedModel, windows: int) -> float:
        return few_of(windows) * sum(work_of(model, anchor) for anchor in self.first)

    def expected_work(
        self, model: LoadedModel, windows: int, length: int, *, gradients: bool = False
    ) -> float:
        """Of screening and all rounds of a search, in the units of a sweep's progress."""
        names = {candidate.component.name for candidate in self.candidates}
        work = sum(
            work_of(model, candidate) * windows + quantizing_work(candidate, length)
            for candidate in self.candidates
        )
        rounds = MEASURED * len(names) / len(self.candidates) * work
        first = gradient_work(model) if gradients else self._first_work(model, windows)
        return first + rounds + sum(map(error_work, self.needed))

    def completed(self, errors: Mapping[Key, float]) -> dict[Key, float]:
        """The errors of all candidates: of `needed` as given, of others from the anchor's and those of similar ones."""
        every = dict(errors)
        for group in self._alike.values():
            anchors = {
                key_of(c): max(errors[key_of(self._anchors[c.component.name])], 1e-30)
                for c in group
            }
            ratio = statistics.median(
                errors[key] / anchor for key, anchor in anchors.items() if key in errors
            )
            for key, anchor in anchors.items():
                every.setdefault(key, ratio * anchor)
        return every

    def undominated(self, errors: Mapping[Key, float]) -> list[Candidate]:
        """Without those that lose clearly to a recipe of no more bytes: no plan of any size needs them."""

        best: dict[str, list[tuple[int, float]]] = {}
        for candidate in self.candidates:
            beaten = (1 + TOLERANCE) * errors[key_of(candidate)]
            best.setdefault(candidate.component.name, []).append(
                (_size(candidate), beaten)
            )
        return [
            c
            for c in self.candidates
            if not any(
                size <= _size(c) and e < errors[key_of(c)]
                for size, e in best[c.component.name]
            )
        ]

    def first_from(
        self, errors: Mapping[Key, float], measured: Mapping[Key, float]
    ) -> dict[Key, float]:
        """The values of `first` by what was measured of the same components."""
        ratios = _medians(
            (key[0], value / max(errors[key], 1e-30)) for key, value in measured.items()
        )
        anchors = map(key_of, self.first)
        return {key: ratios[key[0]] * errors[key] for key in anchors if key[0] in ratios}

    def samples(self, measured: Mapping[Key, float]) -> list[Candidate]:
        """One component of each kind in each recipe that nothing of its kind was measured in."""
        kinds = {name: anchor.component.kind for name, anchor in self._anchors.items()}
        measured_kinds = {(kinds[name], recipe) for name, recipe in measured}
        unknown: dict[Hashable, list[Candidate]] = {}
        for candidate in self.candidates:
            if (candidate.component.kind, candidate.recipe) not in measured_kinds:
                unknown.setdefault(
                    (candidate.component.kind, candidate.recipe), []
                ).append(candidate)
        return [group[len(group) // 2] for group in unknown.values()]

    def predicted(
        self,
        errors: Mapping[Key, float],
        first: Mapping[Key, float],
        measured: Mapping[Key, float],
        samples: Mapping[Key, float] | None = None,
    ) -> dict[Key, float]:
        """The KL of every candidate: measured, or predicted from the values of `first` and corrected by what was
        measured of the same component and of others of its kind, `samples` (on less text) among it."""
        raw: dict[Key, float] = {}
        for key in map(key_of, self.candidates):
            anchor = key_of(self._anchors[key[0]])
            raw[key] = (
                max(first.get(anchor, 0.0), 0.0)
                / max(errors[anchor], 1e-30)
                * errors[key]
            )
        # What was measured differs from its prediction by a factor of its kind and recipe and one of the component.
        ratios = {
            k: v / raw[k]
            for k, v in {**(samples or {}), **measured}.items()
            if raw[k] > 0
        }
        kinds = {name: anchor.component.kind for name, anchor in self._anchors.items()}
        usual = statistics.median(ratios.values()) if ratios else 1.0
        alike = _medians(
            ((kinds[name], recipe), ratio) for (name, recipe), ratio in ratios.items()
        )

        def of_kind(key: Key) -> float:
            return alike.get((kinds[key[0]], key[1]), usual)

        by_component = _medians(
            (key[0], ratio / of_kind(key)) for key, ratio in ratios.items()
        )
        return {
            key: measured.get(key, value * of_kind(key) * by_component.get(key[0], 1.0))
            for key, value in raw.items()
        }


def _size(candidate: Candidate) -> int:
    return candidate.recipe.grid.bytes(candidate.component.shape)


def _medians(pairs: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    groups: dict[Name, list[float]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in groups.items()}
