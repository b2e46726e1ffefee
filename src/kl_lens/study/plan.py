"""`plan`: which component gets which format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kl_lens import planning
from kl_lens.base.errors import PlanError
from kl_lens.base.units import human_speed, spell_share
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.paper import PUBLISHED_METRIC, greedy_plan, paper_points
from kl_lens.planning.handover import Handover, write_recipe
from kl_lens.run.folder import RECIPES, SCREENED, Run
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.run.subjects import plan_digest
from kl_lens.study.events import Events
from kl_lens.study.plan_settings import PlanSettings
from kl_lens.study.rivals import with_rivals
from kl_lens.study.settings import (
    command_of,
)
from kl_lens.study.target_planner import TargetPlanner, nats_allowed, verified
from kl_lens.study.tune import with_tuning
from kl_lens.study.workbench import Workbench
from kl_lens.targets import exported_places
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import FP16, Recipe

OUR_STOCK = "a stock recipe with our methods"


@dataclass(frozen=True)
class PlanResult:
    """Plans that were made or compared, or a frontier."""

    table: SensitivityTable
    plans: list[Plan] = field(default_factory=list)
    written_to: Path | None = None
    differences: dict[str, tuple[Recipe, ...]] | None = None  # of --compare
    frontier: tuple[planning.FrontierPoint, ...] | None = None
    handovers: Sequence[Handover] = ()  # of --write-recipe


def plan(settings: PlanSettings, bench: Workbench, events: Events) -> PlanResult:
    with Run.open(settings.run_folder) as run:
        table = run.table(target=settings.target, predicted=_wants_predictions(settings, run))
        folder = run.folder / "plans"
        if settings.compare:
            plans = [_read(folder, name, table) for name in settings.compare]
            return PlanResult(table, plans, differences=planning.differences(plans, table.components))
        planner = TargetPlanner(settings, run, bench)
        if settings.limits or settings.frontier:
            _require_storable(settings, table, planner)
        if settings.frontier:
            return _frontier(settings, table, planner, events)
        if not settings.dry_run:
            run.note_command(["kl-lens", *command_of(settings)])
        plans = _made(settings, run, table, planner, events)
        for each in plans:
            if predicted := each.notes.get("predicted"):
                events.note(
                    f"{each.name}: the KL of {len(predicted)} of {len(each.assignment)} components was predicted, not "
                    "measured; kl-lens measure with this limit measures them"
                )
        if settings.tune:
            plans = [with_tuning(each, settings.tune, run, planner, bench, events) for each in plans]
        if settings.rivals:
            plans = with_rivals(settings, table, plans, planner, events)
        elif settings.verify:
            factor = planner.interaction(table, plans) if planner.target else 1.0
            plans = [verified(each, table, planner.halves[1], events, factor) for each in plans]
        if settings.dry_run:
            return PlanResult(table, plans)
        if planner.target:
            planning.store_fixed_bytes(run, planner.target, planner.fixed_bytes)
        for each in plans:
            path = planning.plan_path(folder, each.name)
            if each.name != settings.plan:
                _say_replaced(path, each, run, events)
            planning.write_plan(each, path, table.components)
        handovers = (
            _handed_over(settings.write_recipe, plans, planner, run, events) if settings.write_recipe else ()
        )
        return PlanResult(table, plans, folder, handovers=handovers)


def _say_replaced(path: Path, plan: Plan, run: Run, events: Events) -> None:
    """A name that is used again means another plan from now on; files keep the old one until they are exported."""
    with suppress(PlanError):  # none, or one that cannot be read
        earlier = planning.read_plan(path, run.table().components)
        before, now = (plan_digest(each.assignment, None, each.statistics) for each in (earlier, plan))
        if before != now:
            old = [str(place) for (_, name), place in exported_places(run).items() if name == plan.name]
            kept = f"; until the next export, the earlier one stays in {' and '.join(old)}" if old else ""
            events.fail(f"{plan.name} replaces another plan of this name{kept}")


def _handed_over(
    tool: str, plans: Sequence[Plan], planner: TargetPlanner, run: Run, events: Events
) -> list[Handover]:
    """The plans in the language of another tool."""
    statistics, folder = StoredStatistics.held_by(run.folder), run.folder / RECIPES
    made = [
        write_recipe(tool, planner.model, each, folder / f"{each.name}.{tool}", statistics) for each in plans
    ]
    for each in made:
        for note in each.notes:
            events.note(note)
    return made


def _require_storable(settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner) -> None:
    """Otherwise the only plan would be FP16."""
    target, chosen = planner.target, settings.formats or table.formats
    if target is None or set(chosen) == {FP16}:
        return
    grids = [get_format(name.partition("+")[0]) for name in chosen if name != FP16]
    if not any(target.holds(grid, c.shape) is None for grid in grids for c in table.candidates):
        raise PlanError(
            f"{target.title} can store none of the measured formats ({', '.join(chosen)}); repeat kl-lens "
            f"measure with --target {target.name} instead of --formats"
        )


def _wants_predictions(settings: PlanSettings, run: Run) -> bool:
    """Whether a plan may use what was only predicted. A staged search has measured what plans of its own limit use."""
    known = (run.load(SCREENED, run.measured_role(settings.target)) or {}).get("limit")
    names = ("max_bytes", "max_loss", "max_drop")
    asked = {name: value for name in names if (value := getattr(settings, name)) is not None}
    return settings.frontier or bool(settings.limits and asked != known)


def _frontier(
    settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> PlanResult:
    problem = planning.build_problem(
        table,
        metric=_metric(settings, table, events),
        target=planner.target,
        fixed_bytes=planner.fixed_bytes,
        **settings.choice,
    )
    return PlanResult(table, frontier=planning.frontier(problem))


def _read(folder: Path, name: str, table: SensitivityTable) -> Plan:
    return planning.read_plan(planning.plan_path(folder, name), table.components)


def _made(
    settings: PlanSettings, run: Run, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> list[Plan]:
    if settings.plan:
        plan = _read(run.folder / "plans", settings.plan, table)
        return [planning.repredicted(plan, table) if plan.edited else plan]
    made: list[Plan] = []
    if settings.paper or settings.gpu or settings.gpu_int4:
        points = paper_points(
            table,
            metric=settings.metric or PUBLISHED_METRIC,
            pipeline="gpu" if settings.gpu else "gpu-int4" if settings.gpu_int4 else "cpu",
            no_head=settings.no_head,
        )
        for name in _not_in_the_lists(points, table):
            events.warn(f"{name} was never measured; the paper's points leave it at FP16")
        made += points
    for name in settings.uniform:
        made.append(planning.uniform_plan(table, name, no_head=settings.no_head))
    if settings.gamma is not None or settings.gamma_exhaustive is not None:
        made.append(_greedy(settings, table, planner, events))
    if settings.max_drop is not None or settings.max_loss is not None:
        made.append(_within_loss(settings, table, planner, events))
    elif any(value is not None for value in settings.budgets.values()):
        made.append(plan_within_budget(settings, run, table, planner, events))
    return [each if each.target else planner.sized(each) for each in made]


def _not_in_the_lists(points: Sequence[Plan], table: SensitivityTable) -> list[str]:
    """Components that no uniform plan of the paper has measured."""
    unmeasured = planning.Predictor(table).unmeasured
    each = [set(unmeasured(plan.assignment)) for plan in points if plan.family == "uniform"]
    return sorted(set.intersection(*each))


def _greedy(settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner, events: Events) -> Plan:
    gamma = settings.gamma or settings.gamma_exhaustive
    assert gamma is not None
    result = greedy_plan(
        table,
        planner.halves[0].perplexity,
        gamma=gamma,
        exhaustive=settings.gamma_exhaustive is not None,
        metric=_metric(settings, table, events),
        no_head=settings.no_head,
        name=settings.name,
    )
    events.note(
        f"greedy: {result.evaluations} evaluations of perplexity; the original's is {result.baseline:.3f}, "
        f"the plan's {result.perplexity:.3f}"
    )
    return result.plan


def _within_loss(
    settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> Plan:
    """The smallest plan within a measured loss, of KL or of perplexity, on both halves of the held-out text."""
    if settings.max_drop is not None:
        asked, limits = spell_share(settings.max_drop), {"drop": settings.max_drop}
    else:
        assert settings.max_loss is not None
        asked, limits = f"{settings.max_loss:g} nats", {"loss": settings.max_loss}
    result = planning.plan_for_loss(
        planning.build_problem(table, target=planner.target, **settings.choice),
        lambda assignment: planner.lost(assignment, limits),
        max_loss=nats_allowed(limits),
        name=settings.name,
    )
    events.note(
        f"target {asked}: {result.evaluations} plans measured; the smallest that fits loses at most {result.loss:.4g} "
        f"nats per token, one standard error included, on each half of {planner.halves[0].text.label}"
    )
    return replace(result.plan, limits=limits)


def plan_within_budget(
    settings: PlanSettings, run: Run, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> Plan:
    """The plan with the least predicted loss (or bytes, or time) within the limits, counting the target's file."""
    speed = None
    if settings.needs_speeds:
        assert planner.target is not None
        speed = planning.speed_model(run, table, planner.target)
    metric = _metric(settings, table, events)
    solutions: list[planning.BudgetSolution] = []

    def make(fixed_bytes: int) -> Plan:
        problem = planning.build_problem(
            table,
            speed=speed,
            metric=metric,
            target=planner.target,
            fixed_bytes=fixed_bytes,
            **settings.choice,
        )
        limits, goal = settings.budgets, settings.minimise
        solutions.append(planning.plan_for_budget(problem, minimise=goal, name=settings.name, **limits))
        return solutions[-1].plan

    # The solver adds up upper bounds; a stock recipe's file is measured to the byte and may fit where the bounds do
    # not. With other limits or another goal only the solver knows what is best.
    bytes_alone = settings.limits == ["--max-bytes"] and settings.minimise in (None, "kl")
    others = _our_stock_plans(settings, table, planner, metric) if planner.target and bytes_alone else ()
    plan = planner.fitted(make, settings.max_bytes, others)
    solution = next((each for each in solutions if each.plan.assignment == plan.assignment), solutions[-1])
    proof = "proven optimal" if solution.gap == 0 else f"within {solution.gap:.2e} of the optimum"
    events.note(f"least {solution.minimised} within the budget: {proof}, in {solution.seconds:.2f} s")
    if plan.made_by == OUR_STOCK:
        events.note(f"{OUR_STOCK} fits and is predicted to lose less; it is used instead")
    if speed is None:
        return plan
    events.note(f"about {human_speed(solution.totals.seconds)}, predicted {speed.basis}")
    return replace(plan, notes=plan.notes | {"speed": speed.basis})


def _our_stock_plans(
    settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner, metric: str
) -> list[Plan]:
    """The target's stock recipes with our methods."""
    assert planner.target is not None
    stock = planner.target.stock_recipes(planner.model)
    problem = planning.build_problem(
        table, metric=metric, target=planner.target, keep_fused=False, **settings.choice
    )
    return [
        planning.finished_plan(table, "stock", assignment, OUR_STOCK, predictor=problem.predictor)
        for assignment in planning.stock_with_our_methods(problem, [one.assignment for one in stock])
    ]


def _metric(settings: PlanSettings, table: SensitivityTable, events: Events) -> str:
    """--metric, or the metric that predicts damage best here; warns if it is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if settings.metric is None and why is not None:
        events.warn(why)
    return settings.metric or metric
