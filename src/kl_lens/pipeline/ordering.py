"""`calibrate --in-order PLAN`: a finished plan, quantized block by block with the inputs that its quantized part gives.

A run holds the statistics of one such plan. It is kept only where the loss on held-out text falls.
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
    """What putting a plan in order did to its loss on held-out text."""

    plan: Plan  # the one in order, or where that did not help the one given
    before: float
    difference: planning.PairedDifference

    @property
    def accepted(self) -> bool:
        return self.difference.mean < 0


def put_in_order(
    run: Run, model: LoadedModel, name: str, plain: StoredStatistics, settings: HeldOut, bench: Workbench,
    events: Events,
) -> Ordered:  # fmt: skip
    """Writes `NAME.in-order` where its KL on held-out text is below the plan's own."""
    folder = run.folder / "plans"
    plan = planning.read_plan(planning.plan_path(folder, name), model.anatomy.components)
    windows = bench.drawn_again(plain.identity["text"], model.task)
    judging = bench.held_out(settings, run, model.task)
    recipes = parsed(plan.assignment)
    assignment = {component: _in_order(recipe) for component, recipe in recipes.items()}
    if assignment == recipes:
        raise PlanError(
            f"plan {name}: none of its recipes learns from text, so there is nothing to put in order"
        )
    meter = bench.meter(model, judging)
    model.weights.learnt_by(recipes.values(), plan.statistics)
    before = meter.measure(recipes)
    events.note(f"putting {name} in order on {windows.label}, {len(windows)} windows")
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
        raise PlanError(f"{recipe} cannot be put in order: {error}") from None


def _gathered(run: Path, gathering: Callable[[], StoredStatistics]) -> StoredStatistics:
    """What was begun for this very plan and text goes on; what is of another goes away."""
    try:
        return gathering()
    except RunError:
        shutil.rmtree(run / IN_ORDER)
        return gathering()
