"""The paper's sensitivity lists: (component, format) from least to most sensitive, by any metric."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from kl_lens.base.errors import PlanError
from kl_lens.planning.predict import measured_recipes, require_measurements
from kl_lens.run.records import SensitivityTable
from kl_lens.weights.recipes import Recipe

# Name on the command line → key of the measurement, and whether larger is better.
RANKING_METRICS = {
    "kl_student_to_teacher": ("kl_student_to_teacher", False),
    "kl_teacher_to_student": ("kl_teacher_to_student", False),
    "sqnr": ("sqnr_db", True),
    "mse": ("mse", False),
    "delta_cross_entropy": ("delta_cross_entropy", False),
}
PUBLISHED_METRIC = "kl_student_to_teacher"
# The paper's 4-bit and 8-bit formats, and llama.cpp's nearest → prefix of plan names.
FORMAT_PAIRS = {("int4", "int8"): "", ("q4_0", "q8_0"): "ggml_"}


@dataclass(frozen=True)
class Entry:
    """One line of a sensitivity list."""

    component: str
    recipe: Recipe
    value: float


def metric_label(metric: str) -> str:
    """A metric in plan names; the published ranking is plain `kl`."""
    key, _ = require_metric(metric)
    return {"kl_student_to_teacher": "kl", "sqnr_db": "sqnr"}.get(key, key)


def require_metric(metric: str) -> tuple[str, bool]:
    metric = "sqnr" if metric == "sqnr_db" else metric
    if metric not in RANKING_METRICS:
        raise PlanError(f"cannot rank by {metric!r}; choose one of {', '.join(RANKING_METRICS)}")
    return RANKING_METRICS[metric]


def paper_formats(table: SensitivityTable, *, eight_bits_alone: bool = False) -> tuple[tuple[str, ...], str]:
    """The measured pair of formats (the paper's, if both were), and the prefix of its plans."""
    measured = set(measured_recipes(table))
    pairs = [(pair[1:] if eight_bits_alone else pair, prefix) for pair, prefix in FORMAT_PAIRS.items()]
    return max(pairs, key=lambda pair: len(measured.intersection(pair[0])))


def excluded_components(table: SensitivityTable, *, no_head: bool) -> frozenset[str]:
    """Components missing from the published lists: an untied embedding, and the head with `no_head`."""
    left_out = set()
    if table.embedding != table.head:
        left_out.add(table.embedding)
    if no_head:
        left_out.add(table.head)
    return frozenset(left_out)


def sensitivity_list(
    table: SensitivityTable, recipe: Recipe, metric: str, exclude: Container[str] = ()
) -> list[Entry]:
    """One recipe's measurements in the model's order."""
    key, _ = require_metric(metric)
    require_measurements(table, recipe)
    measured = {m.component: m.metrics for m in table.measurements if m.format == recipe}
    entries = []
    for component in table.candidates:
        if component.name in exclude or component.name not in measured:
            continue
        if key not in measured[component.name]:
            raise PlanError(
                f"{component.name} in {recipe}: {key} was not measured; use another --metric or measure again"
            )
        entries.append(Entry(component.name, recipe, measured[component.name][key].value))
    return entries


def ranked(lists: Sequence[Sequence[Entry]], metric: str) -> list[Entry]:
    """The merged lists, least sensitive first.

    Ties keep the order of the lists, then the model's order. NaN means damage beyond measuring and ranks as the worst.
    """
    _, larger_is_better = require_metric(metric)

    def damage(entry: Entry) -> float:
        if math.isnan(entry.value):
            return math.inf
        return -entry.value if larger_is_better else entry.value

    return sorted((entry for entries in lists for entry in entries), key=damage)
