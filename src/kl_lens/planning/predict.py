"""What an assignment costs: its exact size on disk, and the additive prediction of its KL (the sum of its components'
single KLs), with how it compares with what is measured.

In sizes every weight counts once (tied weights are one component). Weights that are not quantizable or not named are
FP16: two bytes each. The size of a recipe depends on its format only, not on the method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.run.readings import KL
from kl_lens.run.records import (
    PREDICTED,
    Component,
    Estimate,
    Measurement,
    Plan,
    SensitivityTable,
    checked_plan_name,
)
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

# Metrics that cannot be summed over components, or where larger is better.
NOT_ADDITIVE = ("sqnr_db", "same_top", "kl_p99", "kl_max")

# A KL is at most the largest gap between two logits. This many times the entropy of a uniform guess leaves room for
# ruined models.
_LARGEST = 1e4
_NOISE = 1e-4  # nats per token: below zero only by rounding
MOST_ERRORS = 2.0  # a difference of more standard errors is not explained by them


class Predictor:
    """Looks up the damage of single components and adds it up.

    A measured KL near the noise floor may be slightly negative by rounding. It counts as zero; otherwise an optimiser
    would collect noise as gain.
    """

    def __init__(self, table: SensitivityTable, metric: str = KL) -> None:
        self.metric = metric
        self._measured: dict[tuple[str, str], Estimate] = {}
        self._predicted: set[tuple[str, str]] = set()
        components = {c.name: c for c in table.components}
        through_fallback: dict[tuple[str, str], Estimate] = {}
        for m in table.measurements:
            estimate = m.metrics.get(self.metric)
            if estimate is None or m.component not in components:
                continue
            if estimate.value < 0:
                estimate = replace(estimate, value=0.0)
            stored, reason = stored_recipe(components[m.component], m.format)
            parsed = m.component, Recipe.parse(m.format)
            if m.compute_dtype == PREDICTED and parsed not in self._measured:
                self._predicted.add(parsed)
            self._measured.setdefault(parsed, estimate)
            if reason is not None:
                through_fallback.setdefault((m.component, stored), estimate)
        # A replacement recipe was measured under the name of the wanted one.
        for key, estimate in through_fallback.items():
            self._measured.setdefault(key, estimate)

    def estimate(self, component: str, recipe: str) -> Estimate | None:
        """Damage of one component in one recipe; None if not measured."""
        if recipe == FP16:
            return Estimate(0.0, 0.0)
        return self._measured.get((component, recipe))

    def unmeasured(self, assignment: Mapping[str, str]) -> list[str]:
        return [c for c, r in assignment.items() if self.estimate(c, r) is None]

    def predicted(self, assignment: Mapping[str, str]) -> list[str]:
        """Components whose damage was predicted, not measured."""
        return [c for c, r in assignment.items() if (c, r) in self._predicted]

    def total(self, assignment: Mapping[str, str]) -> Estimate | None:
        """Predicted KL of a plan; None if a part was never measured.

        All parts were measured on the same windows, so their errors are correlated in an unknown way. The sum of the
        standard errors is an upper bound for any correlation.
        """
        parts = [self.estimate(c, r) for c, r in assignment.items()]
        estimates = [part for part in parts if part is not None]
        if len(estimates) < len(parts):
            return None
        error = math.fsum(estimate.standard_error for estimate in estimates)
        return Estimate(math.fsum(estimate.value for estimate in estimates), error)


def require_sane(table: SensitivityTable, metric: str) -> None:
    """Raises if the metric cannot be summed, or if a value is impossible."""
    metrics = dict[str, Estimate]()
    for m in table.measurements:
        metrics |= m.metrics
    names = ", ".join(name for name in metrics if name not in NOT_ADDITIVE)
    if metric in NOT_ADDITIVE:
        raise PlanError(f"{metric} cannot be added up over components; choose {names}")
    if metrics and metric not in metrics:
        raise PlanError(
            f"{table.model}: no measurement has {metric}; use another --metric ({names}), or measure again"
        )
    most = _most(table)
    for m in table.measurements:
        if why := _impossible(m, metric, most):
            raise PlanError(
                f"{m.component} in {m.format}: {metric} is {m.metrics[metric].value:.4g}, {why}; measure it again, "
                "or use another --metric"
            )


def _impossible(measurement: Measurement, metric: str, most: float) -> str | None:
    """Why a value cannot be a KL, or None. Infinity can: a next token became impossible."""
    estimate = measurement.metrics.get(metric)
    if estimate is None or estimate.value == math.inf:
        return None
    if math.isnan(estimate.value):
        return "which is not a number"
    if metric not in (KL, "kl_student_to_teacher"):
        return None
    error = estimate.standard_error if math.isfinite(estimate.standard_error) else 0.0
    if estimate.value < -(_NOISE + 4 * error):
        return "but a KL is never negative"
    return "far too large for a KL per token" if estimate.value > most else None


def _most(table: SensitivityTable) -> float:
    """Largest plausible KL; the head has one row per token of the vocabulary."""
    heads = (c for c in table.components if c.name == table.head and len(c.shape) > 1)
    rows = next((max(head.shape[-2], 2) for head in heads), 2**20)
    return _LARGEST * math.log(rows)


def finished_plan(
    table: SensitivityTable,
    name: str,
    assignment: Mapping[str, str],
    made_by: str,
    notes: Mapping[str, object] | None = None,
    predictor: Predictor | None = None,
    *,
    family: str = "other",
) -> Plan:
    """A plan with all components named, exact bytes, a prediction, and replaced recipes in the notes."""
    cost = cost_of(table.components, assignment)
    predictor = predictor or Predictor(table)
    settled: dict[str, str] = {
        c.name: cost.stored.get(c.name, FP16) for c in table.candidates
    }
    remarks: dict[str, object] = dict(notes or {})
    if cost.fallbacks:
        remarks["fallbacks"] = cost.fallbacks
    value = None
    if predicted := predictor.total(settled):
        value = finite_or_none(predicted.value)
        remarks["predicted_kl_standard_error"] = finite_or_none(predicted.standard_error)
    else:
        remarks["unmeasured"] = predictor.unmeasured(settled)
    if guessed := predictor.predicted(settled):
        remarks["predicted"] = guessed
    if predictor.metric != KL:
        remarks["predicted_by"] = predictor.metric
    learnt = any(recipe.quantizer.learns for recipe in cost.stored.values())
    return Plan(
        checked_plan_name(name),
        settled,
        made_by,
        value,
        cost.bytes,
        remarks,
        family,
        statistics=table.statistics if learnt else None,
    )


def uniform_plan(table: SensitivityTable, recipe: str, *, no_head: bool = False) -> Plan:
    """One recipe for all components. The name spells `+` as a dot: `uniform_int4-g64.gptq`."""
    wanted = Recipe.parse(recipe)
    head = table.head if no_head else None
    assignment = {c.name: wanted for c in table.candidates if c.name != head}
    name = f"uniform_{wanted.replace('+', '.')}"
    made_by = f"uniform: everything in {wanted}"
    return finished_plan(table, name, assignment, made_by, family="uniform")


def repredicted(plan: Plan, table: SensitivityTable) -> Plan:
    """The same assignment with bytes and prediction computed again, for a plan edited by hand."""
    fresh = finished_plan(table, plan.name, plan.assignment, plan.made_by)
    stale = (
        "fallbacks",
        "predicted_kl_standard_error",
        "unmeasured",
        "predicted",
        "predicted_by",
    )
    lasting = {key: value for key, value in plan.notes.items() if key not in stale}
    return replace(
        plan,
        assignment=fresh.assignment,
        predicted_kl=fresh.predicted_kl,
        bytes=fresh.bytes,
        notes=lasting | fresh.notes,
        measured=None,
        statistics=fresh.statistics,
    )


def measured_recipes(table: SensitivityTable) -> tuple[Recipe, ...]:
    """Measured recipes, in order of first appearance."""
    try:
        return tuple(dict.fromkeys(Recipe.parse(name) for name in table.formats))
    except FormatError as error:
        raise PlanError(f"{table.model}: the measurements name an {error}") from None


def require_measurements(table: SensitivityTable, recipe: Recipe) -> None:
    measured = measured_recipes(table)
    if recipe not in measured:
        raise PlanError(
            f"{table.model}: no measurements at {recipe} (measured: {', '.join(measured) or 'none'}); "
            f"run `kl-lens measure --formats {recipe}` first"
        )


def finite_or_none(value: float) -> float | None:
    """Undefined errors are null in files."""
    return value if math.isfinite(value) else None


def verify(predicted: Estimate, measured: Estimate) -> tuple[bool, str]:
    """Whether the errors, as far as they are known, explain the difference, and a line that says so.

    Prediction and measurement use different text, so their errors are independent.
    """
    ratio = measured.value / predicted.value if predicted.value else math.inf
    numbers = (
        f"predicted {predicted}, measured {measured} nats per token ({ratio:.3g} times)"
    )
    difference = measured.value - predicted.value
    error = math.hypot(predicted.standard_error, measured.standard_error)
    if not math.isfinite(error) or not math.isfinite(difference):
        return True, f"{numbers}; without a known error the difference means nothing"
    if abs(difference) <= MOST_ERRORS * error:
        return True, f"{numbers}; the errors explain the difference"
    direction = "add up to more" if difference > 0 else "partly cancel"
    return False, (
        f"warning: {numbers}; the difference is {abs(difference) / error:.1f} standard errors: the components' "
        f"damages {direction} together, or the texts differ"
    )


def interaction(pairs: Iterable[tuple[float, float]]) -> float:
    """How many times more whole plans lose than the sum of their parts: the geometric mean of measured / predicted.

    Along the frontier it varies by a few percent; docs/method.md has the remaining error.
    """
    logs = [
        math.log(measured / predicted)
        for predicted, measured in pairs
        if predicted > 0 < measured
    ]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


@dataclass(frozen=True)
class RecipeShare:
    """How many components and weights have one recipe."""

    recipe: Recipe
    components: int
    parameters: int
    share: float  # of all weights of the model
    quantizable: bool = True  # False for the row of weights that cannot be quantized


@dataclass(frozen=True)
class Cost:
    """Exact size of a model under an assignment, and the recipes really used."""

    bytes: int
    parameters: int
    stored: dict[str, Recipe]  # quantizable component → the recipe it really gets
    fallbacks: dict[str, str]  # component → why it did not get the wanted recipe
    shares: tuple[RecipeShare, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters if self.parameters else 0.0

    @property
    def shares_text(self) -> str:
        """`int8 40 (61.2 %), int4 10 (8.0 %), kept 73 (0.3 %)`: components, and share of all weights."""
        return ", ".join(
            f"{row.recipe if row.quantizable else 'kept'} {row.components} ({100 * row.share:.1f} %)"
            for row in self.shares
        )


@lru_cache(maxsize=65536)
def _stored(spelling: str, shape: tuple[int, ...]) -> tuple[Recipe, str | None]:
    return fitting_recipe(Recipe.parse(spelling), shape)


@lru_cache(maxsize=65536)
def _bytes(recipe: Recipe, shape: tuple[int, ...]) -> int:
    return recipe.grid.bytes(shape)


def fp16_bytes(component: Component) -> int:
    return 2 * component.parameters


def stored_recipe(component: Component, wanted: str) -> tuple[Recipe, str | None]:
    """The recipe a component gets, and why it differs from the wanted one (or None)."""
    try:
        return _stored(wanted, component.shape)
    except FormatError as error:
        raise PlanError(f"{component.name}: {error}") from None


def component_bytes(component: Component, recipe: Recipe) -> int:
    return fp16_bytes(component) if recipe == FP16 else _bytes(recipe, component.shape)


def cost_of(components: Iterable[Component], assignment: Mapping[str, str]) -> Cost:
    """Computes the size. Recipes that do not fit are replaced; `fallbacks` says why."""
    components = tuple(components)
    if unknown := sorted(set(assignment) - {c.name for c in components}):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise PlanError(
            f"the model has no component {unknown[0]!r}{more}; `kl-lens inspect` lists them all"
        )
    stored: dict[str, Recipe] = {}
    fallbacks: dict[str, str] = {}
    total = 0
    for component in components:
        wanted = assignment.get(component.name, FP16)
        if not component.quantizable:
            if wanted != FP16:
                raise PlanError(
                    f"{component.name} cannot be {wanted}: it stays FP16 ({component.reason}); "
                    "take it out of the plan"
                )
            total += fp16_bytes(component)
            continue
        recipe, reason = stored_recipe(component, wanted)
        stored[component.name] = recipe
        if reason is not None:
            fallbacks[component.name] = reason
        total += component_bytes(component, recipe)
    parameters = sum(c.parameters for c in components)
    shares = _shares(components, stored, parameters)
    return Cost(total, parameters, stored, fallbacks, shares)


def _shares(
    components: tuple[Component, ...], stored: Mapping[str, Recipe], total: int
) -> tuple[RecipeShare, ...]:
    """Most bits first; last, what cannot be quantized."""
    sizes: dict[tuple[Recipe, bool], list[int]] = {}
    for c in components:
        key = (stored.get(c.name, FP16), c.quantizable)
        sizes.setdefault(key, []).append(c.parameters)
    rows = [
        RecipeShare(recipe, len(counts), sum(counts), sum(counts) / total, quantizable)
        for (recipe, quantizable), counts in sizes.items()
    ]
    rows.sort(key=lambda row: (not row.quantizable, -row.recipe.grid.bits, row.recipe))
    return tuple(rows)
