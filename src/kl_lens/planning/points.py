"""The paper's mixed-precision points, by their published definition, and its greedy rule.

Merge the 4-bit and the 8-bit list, sort from least to most sensitive, drop the most sensitive entry, and cut the rest
after ((n−1)//10)·i entries for i = 1 … 10, where n is the length of the merged list before the drop. Within a cut the
later entry of a component wins: 8 bits usually do less damage than 4, so as the cuts grow a component first becomes
INT8 and then INT4. Components not in a cut stay FP16.

The GPU script uses only the 8-bit list, and on Mamba-2 cuts it into eight: ((n−1)//8)·i for i = 1 … 8. (The GPU script
with INT4 makes the CPU's points.)

Ties are broken by a stable sort of the 4-bit list followed by the 8-bit list, each in the model's order. So a component
whose two entries tie gets INT8, the safer one.

llama.cpp has neither INT4 nor INT8. If q4_0 and q8_0 were measured instead, they are used, and plan names begin with
`ggml_`.

The greedy rule quantizes from least to most sensitive while perplexity stays within a budget, γ times that of the FP16
model, with one evaluation per entry. Accepting an entry gives its component that format; an entry that would not make
its component smaller is skipped without an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from kl_lens.base.errors import PlanError
from kl_lens.planning.predict import (
    Predictor,
    component_bytes,
    finished_plan,
    measured_recipes,
    require_measurements,
    stored_recipe,
)
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.weights.recipes import FP16, Recipe

POINTS = 10
MAMBA2_GPU_POINTS = 8
# Pipeline → prefix of its names. `cpu` merges both lists, `gpu` takes the 8-bit list only.
PIPELINES = {"cpu": "", "gpu": "gpu_"}
PUBLISHED_METRIC = "kl_student_to_teacher"  # in plan names: kl
# The paper's 4-bit and 8-bit formats, and llama.cpp's nearest → prefix of plan names.
FORMAT_PAIRS = {("int4", "int8"): "", ("q4_0", "q8_0"): "ggml_"}
# Perplexity under an assignment; the empty assignment is the FP16 model.
Evaluate = Callable[[Mapping[str, str]], float]


@dataclass(frozen=True)
class Entry:
    """One line of a sensitivity list."""

    component: str
    recipe: Recipe
    damage: float


def paper_formats(
    table: SensitivityTable, *, eight_bits_alone: bool = False
) -> tuple[tuple[str, ...], str]:
    """The measured pair of formats (the paper's, if both were), and the prefix of its plans."""
    measured = set(measured_recipes(table))
    first = 1 if eight_bits_alone else 0
    pairs = [(pair[first:], prefix) for pair, prefix in FORMAT_PAIRS.items()]
    return max(pairs, key=lambda pair: len(measured.intersection(pair[0])))


def excluded_components(table: SensitivityTable, *, no_head: bool) -> frozenset[str]:
    """Components missing from the published lists: an untied embedding, and the head with `no_head`."""
    tied = table.embedding == table.head
    return frozenset([table.embedding] * (not tied) + [table.head] * no_head)


def label(metric: str) -> str:
    """A metric in plan names."""
    return "kl" if metric == PUBLISHED_METRIC else metric


def ranked(
    table: SensitivityTable,
    recipes: Sequence[Recipe],
    metric: str,
    exclude: Container[str],
) -> list[Entry]:
    """The merged lists of these recipes, least sensitive first.

    Ties keep the order of the recipes, then the model's order. NaN ranks as the worst.
    """
    sign = -1 if metric in ("sqnr", "same_top") else 1  # larger is better
    key = "sqnr_db" if metric == "sqnr" else metric
    entries = []
    for recipe in recipes:
        require_measurements(table, recipe)
        measured = {
            m.component: m.metrics for m in table.measurements if m.format == recipe
        }
        names = [c.name for c in table.candidates if c.name not in exclude]
        for name in filter(measured.__contains__, names):
            if key not in measured[name]:
                raise PlanError(
                    f"{name} in {recipe}: {key} was not measured; use another --metric or measure again"
                )
            damage = sign * measured[name][key].value
            damage = math.inf if math.isnan(damage) else damage
            entries.append(Entry(name, recipe, damage))
    return sorted(entries, key=lambda entry: entry.damage)


def paper_points(
    table: SensitivityTable,
    *,
    metric: str = PUBLISHED_METRIC,
    pipeline: str = "cpu",
    no_head: bool = False,
) -> list[Plan]:
    """The uniform plans and the points of one pipeline, in the paper's order. conv1d is not included (it is not
    quantizable), nor is an untied embedding, which the published lists do not have."""
    exclude = excluded_components(table, no_head=no_head)
    formats, prefix = paper_formats(table, eight_bits_alone=pipeline == "gpu")
    recipes = [Recipe(name) for name in formats]
    order = ranked(table, recipes, metric, exclude)
    predictor = Predictor(table)
    prefix += PIPELINES[pipeline]

    made_by = f"the paper's points, {pipeline} pipeline, ranked by {metric}"
    common = {"metric": metric, "pipeline": pipeline, "head": not no_head}

    def plan(
        name: str, assignment: dict[str, Recipe], family: str, **notes: object
    ) -> Plan:
        name = f"{prefix}{name}"
        notes = common | notes
        return finished_plan(
            table, name, assignment, made_by, notes, predictor, family=family
        )

    planned = [c.name for c in table.candidates if c.name not in exclude]
    plans = [
        plan(f"uniform_{recipe}", dict.fromkeys(planned, recipe), "uniform")
        for recipe in reversed(recipes)
    ]
    points = POINTS
    if pipeline == "gpu" and table.model_type == "mamba2":
        points = MAMBA2_GPU_POINTS  # its script cuts the list into eight
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
        counts = {"entries": len(cut), "entries_in_all": len(order)}
        plans.append(plan(name, chosen, "paper", **counts))
    return plans


# -- the greedy rule -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GreedyResult:
    plan: Plan
    baseline: float
    perplexity: float  # of the plan
    evaluations: int  # including the baseline


def greedy_plan(
    table: SensitivityTable,
    evaluate: Evaluate,
    *,
    gamma: float = 1.10,
    formats: Sequence[str] | None = None,
    metric: str = PUBLISHED_METRIC,
    no_head: bool = False,
    name: str | None = None,
) -> GreedyResult:
    """Accepts entries while the measured perplexity stays within γ × the FP16 baseline.

    `formats`: default int4 and int8 or, if those were measured, q4_0 and q8_0.
    """
    if not gamma >= 1:
        raise PlanError(
            f"--gamma {gamma:g} demands better than FP16; give 1 or more, such as 1.10"
        )
    exclude = excluded_components(table, no_head=no_head)
    formats, prefix = (formats, "") if formats else paper_formats(table)
    order = ranked(table, [Recipe.parse(f) for f in formats], metric, exclude)
    components = {c.name: c for c in table.candidates}
    baseline = perplexity = float(evaluate({}))
    if not (math.isfinite(baseline) and baseline > 0):
        raise PlanError(
            f"the FP16 model's perplexity is {baseline}; check the text and the checkpoint"
        )
    assignment = dict[str, Recipe]()
    evaluations = 1
    for entry in order:
        component = components[entry.component]
        recipe = stored_recipe(component, entry.recipe)[0]
        current = assignment.get(entry.component, FP16)
        if component_bytes(component, recipe) >= component_bytes(component, current):
            continue
        longer = assignment | {entry.component: recipe}
        reached = float(evaluate(longer))
        evaluations += 1
        if reached <= gamma * baseline:  # False for nan
            assignment = longer
            perplexity = reached
    notes = {
        "gamma": gamma,
        "deciding_perplexity": perplexity,
        "deciding_perplexity_of_the_original": baseline,
        "evaluations": evaluations,
        "metric": metric,
    }
    name = name or f"{prefix}{label(metric)}_gamma{gamma:.2f}"
    made_by = "greedy under a perplexity budget"
    plan = finished_plan(table, name, assignment, made_by, notes, family="greedy")
    return GreedyResult(plan, baseline, perplexity, evaluations)
