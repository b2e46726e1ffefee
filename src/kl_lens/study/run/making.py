"""The stages up to a plan."""

from __future__ import annotations

from dataclasses import asdict, replace

from kl_lens import planning
from kl_lens.base.errors import PlanError, TargetError
from kl_lens.measuring.perturbation import states_of
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import Sweep
from kl_lens.run.folder import CALIBRATION, RECOMMENDED, recommended_name
from kl_lens.run.records import CACHES, Plan as StoredPlan
from kl_lens.study import calibrate, measure, plan
from kl_lens.study.run.costs import Cost, Costs
from kl_lens.study.run.job import UNIFORM_FP16, Job
from kl_lens.study.run.settings import NONE
from kl_lens.study.run.stage import Basis, OfTarget, Stage
from kl_lens.study.settings import Limits
from kl_lens.targets import describe_target, get_target
from kl_lens.weights.recipes import FP16, Recipe, parsed


class Inspect(Stage):
    verb = "inspect"

    def work(self, job: Job) -> object:
        return job.model

    def cost(self, costs: Costs) -> Cost:
        return Cost(costs.opened)


class Calibrate(Stage):
    """Gathers statistics if any recipe of the targets, or any stock recipe, needs them."""

    verb = "calibrate"

    def applies(self, job: Job) -> bool:
        recipes = {recipe for target in job.targets for recipe in job.menu(target)}
        if job.settings.rivals != NONE:
            for target in job.targets:
                for stock in get_target(target).stock_recipes(job.model):
                    recipes |= set(stock.assignment.values())
        return any(Recipe.parse(recipe).quantizer.learns for recipe in recipes)

    def prepare(self, job: Job) -> None:
        job.background.finish_tokenizing()

    def basis(self, job: Job) -> Basis:
        stored = StoredStatistics.held_by(job.folder)
        lost = stored is None or not stored.covers(job.model)
        return Basis("calibrate", asdict(self._text(job)), lost=lost)

    def work(self, job: Job) -> object:
        return calibrate.gather_statistics(
            job.journal, job.model, self._text(job), job.session
        )

    def _text(self, job: Job) -> calibrate.LearningText:
        text = job.settings.calibration
        # Not the sweep's seed: no method is measured on the text it learned from.
        return calibrate.LearningText(
            text=text.text, window_length=text.window_length, seed=text.seed + 1
        )

    def cost(self, costs: Costs) -> Cost | None:
        return costs.learning()


# -- measuring ------------------------------------------------------------------------------------------------


class Searched(OfTarget):
    def is_survived(self, job: Job, error: Exception) -> bool:
        """For other targets the same limit may be enough."""
        if not isinstance(error, PlanError | TargetError) or len(job.targets) == 1:
            return False
        job.give_up(self.target, f"plan --target {self.target}", str(error))
        return True


class Measure(Searched):
    verb = "measure"

    def applies(self, job: Job) -> bool:
        return super().applies(job) and job.settings.table is None

    def begin(self, job: Job, passed: Stage | None) -> None:
        """The text is tokenized while the FP16 file is written and tried, which needs one processor."""
        if (
            passed is None
            and job.background.tokenizing is None
            and job.journal.text_identity(CALIBRATION) is None
        ):
            # Runs the model, which an export beside the other thread changes for a while.
            job.model.beginning.settle(job.model, job.settings.calibration.text)
            job.background.tokenize(job.draw_windows)

    def prepare(self, job: Job) -> None:
        job.background.finish_tokenizing()

    def work(self, job: Job) -> object:
        exhaustive = job.settings.exhaustive
        return measure.measure_recipes(
            job.session,
            Sweep(job.model, job.journal, memory_budget=job.settings.opening.memory),
            job.menu(self.target),
            job.draw_windows(),
            job.hire,
            target=self.target,
            limits=Limits() if exhaustive else job.limits(self.target),
            held_out=job.settings.held_out,
            exhaustive=exhaustive,
            gradients=job.settings.gradients,
        )

    def cost(self, costs: Costs) -> Cost:
        return costs.measuring(self.target)


class MeasureCaches(OfTarget):
    """Keys and values in the target's formats, which a plan for a memory chooses from."""

    verb = "measure"

    def applies(self, job: Job) -> bool:
        return (
            super().applies(job)
            and bool(get_target(self.target).cache_formats)
            and any(c.kind in CACHES for c in states_of(job.model))
        )

    def basis(self, job: Job) -> Basis:
        return Basis(f"states {self.target}", get_target(self.target).cache_formats)

    def work(self, job: Job) -> object:
        text = replace(job.settings.calibration, windows=None, window_length=None)
        return measure.measure_states(
            job.session,
            Sweep(job.model, job.journal, memory_budget=job.settings.opening.memory),
            job.session.calibration_windows(
                measure.states_text(text, job.model), job.model.task
            ),
            job.hire,
            get_target(self.target).cache_formats,
            measure.CACHES_ONLY,
        )


# -- planning -------------------------------------------------------------------------------------------------


class PlanFP16(Stage):
    verb = "plan"

    def basis(self, job: Job) -> Basis:
        return Basis("plan fp16", outputs=[f"plans/{UNIFORM_FP16}.json"])

    def work(self, job: Job) -> object:
        planner = job.planner()
        table = job.journal.table()
        return plan.finished(planner, table, [planning.uniform_plan(table, FP16)])

    def finish(self, job: Job) -> None:
        for name in job.settings.named:
            if name not in job.targets:
                job.events.tell(f"left out: {describe_target(name).lacks()}")
        job.refuse_without_target()


class PlanStock(OfTarget):
    """The largest of the usual stock recipes, which nearly always is one of the files that decide: its file is read
    while a GPU measures."""

    verb = "plan"

    def applies(self, job: Job) -> bool:
        target = self.target
        return (
            super().applies(job)
            and not job.is_planned(target)
            and len(job.stock(target)) > 0
        )

    def work(self, job: Job) -> object:
        planner = job.planner(self.target)
        return plan.finished(planner, job.journal.table(), [self._largest(job)])

    def finish(self, job: Job) -> None:
        job.early[self.target] = self._largest(job).name

    def _largest(self, job: Job) -> StoredPlan:
        return max(job.stock(self.target), key=lambda stock: stock.file_bytes or 0)


class Plan(Searched):
    """The recommended plan; stock recipes to compare with."""

    verb = "plan"

    def begin(self, job: Job, passed: Stage | None) -> None:
        """Another process quantizes what the usual stock recipes need."""
        target = self.target
        if (
            isinstance(passed, Calibrate)
            and job.background.quantizes
            and job.settings.rivals != NONE
            and target in job.targets
            and not job.is_planned(target)
        ):
            assignments = [parsed(stock.assignment) for stock in job.stock(target)]
            parts = [part for stock in assignments for part in stock.items()]
            job.background.quantize(target, [*dict.fromkeys(parts)])

    def prepare(self, job: Job) -> None:
        job.background.leave_quantizing(self.target)

    def basis(self, job: Job) -> Basis:
        settings = job.settings
        name = settings.recommended(self.target)
        limits = job.limits(self.target).given
        return Basis(
            f"plan {name}",
            (limits, self._rivals(job), settings.tune, asdict(settings.held_out)),
            job.measurements_digest(self.target),
            [f"plans/{name}.json"],
        )

    def work(self, job: Job) -> object:
        planner = job.planner(self.target, job.limits(self.target))
        table = planner.table()
        name = job.settings.recommended(self.target)
        best = plan.plan_within(planner, table, plan.Choosing(name=name))
        rivals = self._rivals(job)
        tune = job.settings.tune
        return plan.finished(
            planner, table, [best], rivals=rivals, verify=True, tune=tune
        )

    def _rivals(self, job: Job) -> str | None:
        rivals = job.settings.rivals
        return None if rivals == NONE else rivals

    def finish(self, job: Job) -> None:
        name = job.settings.recommended(self.target)
        job.journal.store(RECOMMENDED, recommended_name(self.target), name)

    def cost(self, costs: Costs) -> Cost:
        return costs.planning()
