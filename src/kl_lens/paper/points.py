"""The paper's mixed-precision points, by their published definition.

Merge the 4-bit and the 8-bit list, sort from least to most sensitive, drop the most sensitive entry, and cut the rest
after ((n−1)//10)·i entries for i = 1 … 10, where n is the length of the merged list before the drop. Within a cut the
later entry of a component wins: 8 bits usually do less damage than 4, so as the cuts grow a component first becomes
INT8 and then INT4. Components not in a cut stay FP16.

The GPU script uses only the 8-bit list, and on Mamba-2 cuts it into eight: ((n−1)//8)·i for i = 1 … 8. The GPU script
with INT4 differs from the CPU's only in names, on Mamba-2 too.

Ties are broken by a stable sort of the 4-bit list followed by the 8-bit list, each in the model's order. So a component
whose two entries tie gets INT8, the safer one.

llama.cpp has neither INT4 nor INT8. If q4_0 and q8_0 were measured instead, they are used, and plan names begin with
`ggml_`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from kl_lens.base.errors import PlanError
from kl_lens.planning.predict import Predictor, finished_plan, measured_recipes, require_measurements
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.weights.recipes import Recipe

POINTS = 10
MAMBA2_GPU_POINTS = 8
# Pipeline → prefix of its names. `cpu` and `gpu-int4` merge both lists, `gpu` takes the 8-bit list only.
PIPELINES = {"cpu": "", "gpu": "gpu_", "gpu-int4": "gpu_int4_"}
PUBLISHED_METRIC = "kl_student_to_teacher"  # in plan names: kl
# The paper's 4-bit and 8-bit formats, and llama.cpp's nearest → prefix of plan names.
FORMAT_PAIRS = {("int4", "int8"): "", ("q4_0", "q8_0"): "ggml_"}


@dataclass(frozen=True)
class Entry:
    """One line of a sensitivity list."""

    component: str
    recipe: Recipe
    value: float


def paper_formats(table: SensitivityTable, *, eight_bits_alone: bool = False) -> tuple[tuple[str, ...], str]:
    """The measured pair of formats (the paper's, if both were), and the prefix of its plans."""
    measured = set(measured_recipes(table))
    pairs = [(pair[1:] if eight_bits_alone else pair, prefix) for pair, prefix in FORMAT_PAIRS.items()]
    return max(pairs, key=lambda pair: len(measured.intersection(pair[0])))


def excluded_components(table: SensitivityTable, *, no_head: bool) -> frozenset[str]:
    """Components missing from the published lists: an untied embedding, and the head with `no_head`."""
    tied = table.embedding == table.head
    return frozenset([table.embedding] * (not tied) + [table.head] * no_head)


def label(metric: str) -> str:
    """A metric in plan names."""
    return "kl" if metric == PUBLISHED_METRIC else metric


def ranked(
    table: SensitivityTable, recipes: Sequence[Recipe], metric: str, exclude: Container[str]
) -> list[Entry]:
    """The merged lists of these recipes, least sensitive first.

    Ties keep the order of the recipes, then the model's order. NaN ranks as the worst.
    """
    larger_is_better = metric in ("sqnr", "same_top")
    key = "sqnr_db" if metric == "sqnr" else metric
    entries = []
    for recipe in recipes:
        require_measurements(table, recipe)
        measured = {m.component: m.metrics for m in table.measurements if m.format == recipe}
        for name in (c.name for c in table.candidates if c.name in measured and c.name not in exclude):
            if key not in measured[name]:
                raise PlanError(
                    f"{name} in {recipe}: {key} was not measured; use another --metric or measure again"
                )
            entries.append(Entry(name, recipe, measured[name][key].value))

    def damage(entry: Entry) -> float:
        if math.isnan(entry.value):
            return math.inf
        return -entry.value if larger_is_better else entry.value

    return sorted(entries, key=damage)


def paper_points(
    table: SensitivityTable,
    *,
    metric: str = PUBLISHED_METRIC,
    pipeline: str = "cpu",
    no_head: bool = False,
) -> list[Plan]:
    """The uniform plans and the points of one pipeline, in the paper's order.

    The head is included unless `no_head`. conv1d is not (it is not quantizable), nor is an untied embedding, which the
    published lists do not have.
    """
    exclude = excluded_components(table, no_head=no_head)
    formats, prefix = paper_formats(table, eight_bits_alone=pipeline == "gpu")
    recipes = [Recipe(name) for name in formats]
    order = ranked(table, recipes, metric, exclude)
    predictor = Predictor(table)
    prefix += PIPELINES[pipeline]

    def plan(name: str, assignment: dict[str, Recipe], family: str, **notes: object) -> Plan:
        notes = {"metric": metric, "pipeline": pipeline, "head": not no_head, **notes}
        made_by = f"the paper's points, {pipeline} pipeline, ranked by {metric}"
        return finished_plan(table, f"{prefix}{name}", assignment, made_by, notes, predictor, family=family)

    planned = [c.name for c in table.candidates if c.name not in exclude]
    plans = [plan(f"uniform_{r}", dict.fromkeys(planned, r), "uniform") for r in reversed(recipes)]
    # The GPU script cuts the 8-bit list of a Mamba-2 into eight.
    points = MAMBA2_GPU_POINTS if pipeline == "gpu" and table.model_type == "mamba2" else POINTS
    step = (len(order) - 1) // points
    if step <= 0:
        raise PlanError(
            f"the paper's points need at least {points + 1} measurements, but there are {len(order)}; "
            "measure more components or use a budget instead"
        )
    for index in range(1, points + 1):
        cut = order[: step * index]
        name = f"{label(metric)}_point{index:02d}"
        # The later entry of a component wins.
        chosen = {entry.component: entry.recipe for entry in cut}
        plans.append(plan(name, chosen, "paper", entries=len(cut), entries_in_all=len(order)))
    return plans


def best_paper_point(plans: Sequence[Plan], rival: Plan) -> Plan | None:
    """The best of the paper's points that are no larger than `rival`; else the smallest of all.

    By measured KL if all of them have it, otherwise by predicted KL.
    """
    points = [p for p in plans if p.family == "paper"]
    if not points:
        return None
    fitting = [p for p in points if (p.bytes or 0) <= (rival.bytes or 0)]
    if not fitting:
        return min(points, key=lambda p: p.bytes or 0)
    if all(p.measured for p in fitting):
        return min(fitting, key=lambda p: p.measured.kl.value if p.measured else math.inf)
    return min(fitting, key=lambda p: p.predicted_kl or 0.0)
