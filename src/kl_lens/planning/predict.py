"""The additive prediction: the KL of a plan is the sum of what its components cost one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kl_lens.errors import PlanError
from kl_lens.planning.cost import FP16, cost_of, stored_format
from kl_lens.records import Estimate, Plan, SensitivityTable

PREDICTED_METRIC = "kl_teacher_to_student"


class Predictor:
    """Looks up single-component damage and adds it up.

    A mean KL is never negative, but a measured one may be by rounding, next to the noise floor; such values
    count as zero, or an optimiser would collect noise as if it were a gain.
    """

    def __init__(self, table: SensitivityTable, metric: str = PREDICTED_METRIC) -> None:
        self.metric = metric
        self._measured: dict[tuple[str, str], Estimate] = {}
        shapes = {c.name: c for c in table.components}
        through_fallback: dict[tuple[str, str], Estimate] = {}
        for m in table.measurements:
            estimate = m.metrics.get(metric)
            if estimate is None or m.component not in shapes:
                continue
            clamped = Estimate(0.0 if estimate.value < 0 else estimate.value, estimate.standard_error)
            self._measured.setdefault((m.component, m.format), clamped)
            stored, reason = stored_format(shapes[m.component], m.format)
            if reason is not None:
                through_fallback.setdefault((m.component, stored), clamped)
        # What a format falls back to was measured under the name that was asked for.
        for key, estimate in through_fallback.items():
            self._measured.setdefault(key, estimate)

    def estimate(self, component: str, format_name: str) -> Estimate | None:
        """Damage of one component in one format; None where nobody measured it."""
        if format_name == FP16:
            return Estimate(0.0, 0.0)
        return self._measured.get((component, format_name))

    def unmeasured(self, assignment: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(c for c, f in assignment.items() if self.estimate(c, f) is None)

    def total(self, assignment: Mapping[str, str]) -> Estimate | None:
        """Predicted KL of a plan; None where a part of it was never measured.

        All parts were measured on the same windows, so their errors are correlated in a way that the table
        does not hold. The sum of the standard errors is an upper bound whatever the correlation.
        """
        estimates = [self.estimate(c, f) for c, f in assignment.items()]
        known = [e for e in estimates if e is not None]
        if len(known) < len(estimates):
            return None
        return Estimate(math.fsum(e.value for e in known), math.fsum(e.standard_error for e in known))


def complete(table: SensitivityTable, assignment: Mapping[str, str]) -> dict[str, str]:
    """The assignment with every quantizable component named, in the model's order."""
    return {c.name: assignment.get(c.name, FP16) for c in table.candidates}


def finished_plan(
    table: SensitivityTable,
    name: str,
    assignment: Mapping[str, str],
    made_by: str,
    notes: Mapping[str, object] | None = None,
    predictor: Predictor | None = None,
) -> Plan:
    """A plan with all components named, its exact bytes, its prediction, and its fallbacks in the notes."""
    cost = cost_of(table.components, assignment)
    predictor = predictor or Predictor(table)
    settled = complete(table, cost.stored)
    predicted = predictor.total(settled)
    remarks: dict[str, object] = dict(notes or {})
    if cost.fallbacks:
        remarks["fallbacks"] = cost.fallbacks
    if predicted is not None:
        remarks["predicted_kl_standard_error"] = _finite_or_none(predicted.standard_error)
    else:
        remarks["unmeasured"] = list(predictor.unmeasured(settled))
    value = predicted.value if predicted is not None and math.isfinite(predicted.value) else None
    return Plan(name, settled, made_by, predicted_kl=value, bytes=cost.bytes, notes=remarks)


def repredicted(plan: Plan, table: SensitivityTable) -> Plan:
    """The same assignment with bytes and prediction computed afresh: what a plan edited by hand needs."""
    fresh = finished_plan(table, plan.name, plan.assignment, plan.made_by)
    stale = ("fallbacks", "predicted_kl_standard_error", "unmeasured")
    kept = {key: value for key, value in plan.notes.items() if key not in stale}
    return replace(fresh, notes={**kept, **fresh.notes})


def require_measurements(table: SensitivityTable, format_name: str) -> None:
    if format_name not in table.formats:
        measured = ", ".join(table.formats) or "none"
        raise PlanError(
            f"{table.model}: no measurements at {format_name} (measured: {measured}); "
            f"run `kl-lens measure --formats {format_name}` first"
        )


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
