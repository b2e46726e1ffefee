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
from collections.abc import Sequence

from kl_lens.base.errors import PlanError
from kl_lens.paper.lists import (
    PUBLISHED_METRIC,
    Entry,
    excluded_components,
    metric_label,
    paper_formats,
    ranked,
    sensitivity_list,
)
from kl_lens.planning.predict import Predictor, finished_plan
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.weights.recipes import Recipe

POINTS = 10
MAMBA2_GPU_POINTS = 8

# Pipeline → prefix of its names. `cpu` and `gpu-int4` merge both lists, `gpu` takes the 8-bit list only.
PIPELINES = {"cpu": "", "gpu": "gpu_", "gpu-int4": "gpu_int4_"}


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
    if pipeline not in PIPELINES:
        raise PlanError(f"unknown pipeline {pipeline!r}; choose one of {', '.join(PIPELINES)}")
    exclude = excluded_components(table, no_head=no_head)
    formats, prefix = paper_formats(table, eight_bits_alone=pipeline == "gpu")
    recipes = [Recipe(name) for name in formats]
    lists = [sensitivity_list(table, recipe, metric, exclude) for recipe in recipes]
    order = ranked(lists, metric)
    predictor = Predictor(table)
    prefix += PIPELINES[pipeline]
    made_by = f"the paper's points, {pipeline} pipeline, ranked by {metric}"
    shared_notes: dict[str, object] = {"metric": metric, "pipeline": pipeline, "head": not no_head}
    planned = [c.name for c in table.candidates if c.name not in exclude]
    plans = [
        finished_plan(
            table,
            f"{prefix}uniform_{recipe}",
            dict.fromkeys(planned, recipe),
            made_by,
            shared_notes,
            predictor,
            family="uniform",
        )
        for recipe in reversed(recipes)
    ]
    for index, cut in enumerate(cuts(order, points_of(table, pipeline)), start=1):
        plans.append(
            finished_plan(
                table,
                f"{prefix}{metric_label(metric)}_point{index:02d}",
                assignment_of(cut),
                made_by,
                {**shared_notes, "entries": len(cut), "entries_in_all": len(order)},
                predictor,
                family="paper",
            )
        )
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


def cuts(order: Sequence[Entry], points: int) -> list[list[Entry]]:
    """Growing heads of a sorted list."""
    without_worst = order[:-1]
    step = len(without_worst) // points  # (n − 1) // 10
    if step == 0:
        raise PlanError(
            f"the paper's points need at least {points + 1} measurements, but there are {len(order)}; "
            "measure more components or use a budget instead"
        )
    return [list(without_worst[: step * i]) for i in range(1, points + 1)]


def assignment_of(entries: Sequence[Entry]) -> dict[str, Recipe]:
    """Component → recipe; the later entry of a component wins."""
    return {entry.component: entry.recipe for entry in entries}


def points_of(table: SensitivityTable, pipeline: str) -> int:
    """Ten points; the GPU script cuts the 8-bit list of a Mamba-2 into eight."""
    return MAMBA2_GPU_POINTS if pipeline == "gpu" and table.model_type == "mamba2" else POINTS
