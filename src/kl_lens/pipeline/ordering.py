"""`calibrate --in-order PLAN`: quantizes a plan block by block, each with inputs from the quantized blocks before it.

A run holds the statistics of one such plan. It is kept only if the KL on held-out text falls.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kl_lens import planning
from kl_lens.calibration import IN_ORDER, StoredStatistics, gather_in_order
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import FormatError, PlanError, RunError
from kl_lens.pipeline.events import Events, going_on
from kl_lens.pipeline.settings import HeldOut
from kl_lens.pipeline.workbench import Workbench
from kl_lens.recipes import Recipe, parsed
from kl_lens.records import Measured, Plan
from kl_lens.runs import Run

METHOD = "ordered"


@dataclass(frozen=True)
class Ordered:
    """The effect on the KL on held-out text."""

    plan: Plan  # the new plan, or the given one if the KL did not fall
    before: float
    difference: planning.PairedDifference

    @property
    def accepted(self) -> bool:
        return self.difference.mean < 0


def put_in_order(
    run: Run, model: LoadedModel, name: str, plain: StoredStatistics, settings: HeldOut, bench: Workbench,
    events: Events,
) -> Ordered:  # fmt: skip
    """Writes `NAME.in-order` if its KL on held-out text is below the plan's."""
    folder = run.folder / "plans"
    plan = planning.read_plan(planning.plan_path(folder, name), model.anatomy.components)
    windows = bench.drawn_again(plain.identity["text"], model.task)
    judging = bench.held_out(settings, run, model.task)
    recipes = parsed(plan.assignment)
    assignment = {component: _in_order(recipe) for component, recipe in recipes.items()}
    if assignment == recipes:
        raise PlanError(
            f"plan {name}: --in-order needs a plan with recipes that learn from text, such as int4-g64+gptq"
        )
    meter = bench.meter(model, judging)
    model.weights.learnt_by(recipes.values(), plan.statistics)
    before = meter.measure(recipes)
    events.note(f"quantizing {name} in order on {windows.label}, {len(windows)} windows")
    with going_on(run.folder), events.progress("in order") as shown:
        shown.started(len(model.chain), 0)
        made = _gathered(run.folder, lambda: gather_in_order(
            model, windows, run.folder, plain, assignment,
            progress=lambda done, blocks: shown.advanced(1, f"block {done - 1}"),
        ))  # fmt: skip
    after = meter.measure(assignment)
    difference = planning.paired_difference(after.windows, before.windows)
    if difference.mean >= 0:
        shutil.rmtree(run.folder / IN_ORDER)
        return Ordered(plan, before.kl.value, difference)
    measured = Measured(
        after.kl, after.perplexity, after.original_perplexity, judging.label, len(after.windows)
    )
    notes = {"in_order": f"of {name}, whose KL there is {before.kl.value:.3g}"}
    better = replace(
        plan, name=f"{name}.in-order", assignment=dict(assignment), made_by=f"{plan.made_by}, in order",
        measured=measured, predicted_kl=None, notes=notes, statistics=made.digest,
    )  # fmt: skip
    planning.write_plan(better, planning.plan_path(folder, better.name), model.anatomy.components)
    return Ordered(better, before.kl.value, difference)


def _in_order(recipe: Recipe) -> Recipe:
    if not recipe.quantizer.learns:
        return recipe
    try:
        return Recipe.parse(f"{recipe.grid.name}+{METHOD}")
    except FormatError as error:
        raise PlanError(f"{recipe} cannot be quantized in order: {error}") from None


def _gathered(run: Path, gathering: Callable[[], StoredStatistics]) -> StoredStatistics:
    """Resumes if it was begun for this plan and text; otherwise starts over."""
    try:
        return gathering()
    except RunError:
        shutil.rmtree(run / IN_ORDER)
        return gathering()
