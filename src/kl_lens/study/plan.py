"""`plan`: which component gets which format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.base.errors import PlanError
from kl_lens.base.units import human_speed, spell_share
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.paper import PUBLISHED_METRIC, greedy_plan, paper_points
from kl_lens.planning.handover import TOOLS, Handover, write_recipe
from kl_lens.run.folder import RECIPES, SCREENED, Run
from kl_lens.run.records import Plan, SensitivityTable, checked_plan_name
from kl_lens.run.subjects import plan_digest
from kl_lens.study import settings as of
from kl_lens.study.planner import KL, TargetPlanner, nats_allowed
from kl_lens.study.session import Session
from kl_lens.study.settings import HeldOut, Limits, Opening, Settings, group, grouped, option
from kl_lens.study.tune import with_tuning
from kl_lens.targets import TARGETS, exported_places
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import FP16, Recipe

OUR_STOCK = "a stock recipe with our methods"
ALL, USUAL = "all", "usual"  # values of --rivals
TUNING_WINDOWS = 2048
_paper = grouped("the paper's points")
_quality = grouped("greedy under a quality budget")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("measuring on held-out text")


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """What plans choose from, and by what."""

    metric: str | None = _paper(
        None,
        f"minimise this (default: {PUBLISHED_METRIC} for the paper's points, otherwise {KL}): mse, "
        "delta_cross_entropy, another objective that was measured, or for the paper's points sqnr",
        metavar="NAME",
    )
    no_head: bool = option(False, "keep the head in FP16, as the published models do")
    formats: tuple[str, ...] = _budget((), "comma-separated (default: all measured formats)", kind=of.NAMES)
    name: str | None = option(None, "name of the new plan")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    verb: ClassVar[str] = "plan"

    run: str | None = of.of_run()
    model: str | None = of.moved_model()
    opening: Opening = group(Opening)
    weights: str = of.place_of_weights()
    paper: str | None = _paper(
        None, "uniform INT8 and INT4, and points 01 to 10 (gpu: of INT8 and FP16; gpu-int4: with INT4)",
        choices=("cpu", "gpu", "gpu-int4"), nargs="?", bare="cpu",
    )  # fmt: skip
    choosing: Choosing = group(Choosing)
    uniform: tuple[str, ...] = option(
        (), "one plan per format, the same for all components; for example fp16,int8",
        kind=of.NAMES, metavar="FORMATS",
    )  # fmt: skip
    gamma: float | None = _quality(
        None, "quantize while held-out perplexity ≤ G × the original's", metavar="G", excludes="limit"
    )
    gamma_exhaustive: float | None = _quality(
        None, "the same, one component at a time, as in the paper", metavar="G", excludes="limit"
    )
    limits: Limits = group(Limits)
    max_bpw: float | None = _budget(None, "bits per weight, over all weights", metavar="BITS")
    max_kl: float | None = _budget(None, "predicted KL per token", metavar="NATS")
    min_speed: float | None = _budget(
        None, "predicted tokens per second of the --target's file, for example 30; run kl-lens benchmark first",
        metavar="TOKENS",
    )  # fmt: skip
    minimise: str | None = _budget(
        None, "default: the one without a limit (seconds: per token)", choices=("bytes", "kl", "seconds")
    )
    frontier: bool = _budget(False, "print the Pareto frontier of bytes and KL", excludes="look")
    verify: bool = _proof(False, "measure the whole plan")
    rivals: str | None = _proof(
        None,
        "also measure the target's stock recipes, such as Q4_K_M; one that is no larger and not worse replaces the "
        "plan (usual: a few of them; without a value: all)",
        choices=(USUAL, ALL), nargs="?", bare=ALL,
    )  # fmt: skip
    tune: int | None = _proof(
        None,
        "also tune the scales with gradients, so that the KL on calibration text falls; kept if it falls on held-out "
        f"text too (default: {TUNING_WINDOWS} windows)",
        kind=of.COUNT, nargs="?", bare=TUNING_WINDOWS, metavar="WINDOWS",
    )  # fmt: skip
    held_out: HeldOut = group(HeldOut)
    target: str | None = option(
        None, "plan for this target: its formats, its measurements, the size of its files", choices=TARGETS
    )
    plan: str | None = option(
        None, "a plan of the run to --verify or to compare with --rivals", metavar="NAME", excludes="look"
    )
    compare: tuple[str, ...] = option(
        (), "show plans side by side", nargs="+", metavar="NAME", excludes="look"
    )
    write_recipe: str | None = option(
        None, f"also write the plan for another tool, to RUN/recipes: {', '.join(TOOLS)}",
        choices=tuple(TOOLS), metavar="TOOL",
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        searches = _flags(
            gamma=self.gamma, gamma_exhaustive=self.gamma_exhaustive,
            max_loss=self.limits.max_loss, max_drop=self.limits.max_drop,
        )  # fmt: skip
        others = _flags(max_bpw=self.max_bpw, max_kl=self.max_kl, min_speed=self.min_speed)
        limits = [*searches, *_flags(max_bytes=self.limits.max_bytes), *others]
        new = [*_flags(paper=self.paper, uniform=self.uniform), *limits]
        silent = _flags(frontier=self.frontier, compare=self.compare)
        looks = [*silent, *_flags(plan=self.plan)]
        if looks and new:
            raise PlanError(f"{looks[0]} makes no new plan: leave out {', '.join(new)}, or {looks[0]}")
        if not looks and not new and not self.rivals:
            raise PlanError(
                "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-loss, "
                "--max-drop, --min-speed, --rivals or --frontier; or name a plan with --plan to --verify it"
            )
        if searches and others:
            raise PlanError(
                f"{searches[0]} searches by itself: leave out {', '.join(others)}, or {searches[0]}"
            )
        if self.choosing.name is not None:
            checked_plan_name(self.choosing.name)
            if not limits:
                raise PlanError(
                    f"--name {self.choosing.name} names a plan made by a limit, such as --max-bytes"
                )
        if silent and (writes := _flags(write_recipe=self.write_recipe, tune=self.tune)):
            raise PlanError(f"{writes[0]} needs a plan, and {silent[0]} makes none: leave one of them out")
        if self.target is None and (self.min_speed is not None or self.minimise == "seconds"):
            raise PlanError(
                "--min-speed and --minimise seconds are about a target's files: name it with --target"
            )
        if self.target is None and self.rivals:
            raise PlanError("--rivals compares with the stock recipes of a target: name it with --target")
        if searches or self.verify or self.rivals or self.tune:
            self.held_out.check(searches=bool(self.limits.loss))

    @property
    def has_limit(self) -> bool:
        others = self.gamma, self.gamma_exhaustive, self.max_bpw, self.max_kl, self.min_speed
        return bool(self.limits.given) or any(limit is not None for limit in others)


def _flags(**values: object) -> list[str]:
    """The flags of the values that are set. (A limit of 0 is.)"""
    given = [name for name, value in values.items() if value is not False and value not in (None, ())]
    return [f"--{name.replace('_', '-')}" for name in given]


@dataclass(frozen=True)
class PlanResult:
    """Plans that were made or compared, or a frontier."""

    table: SensitivityTable
    plans: list[Plan] = field(default_factory=list)
    written_to: Path | None = None
    differences: dict[str, tuple[Recipe, ...]] | None = None  # of --compare
    frontier: tuple[planning.FrontierPoint, ...] | None = None
    handovers: Sequence[Handover] = ()  # of --write-recipe


def plan(settings: PlanSettings, session: Session) -> PlanResult:
    with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
        table = run.table(target=settings.target, predicted=settings.frontier)
        if settings.has_limit:
            table = table_within(run, settings.target, settings.limits)
        if settings.compare:
            plans = [_read(run, name, table) for name in settings.compare]
            return PlanResult(table, plans, differences=planning.differences(plans, table.components))
        opened = partial(session.model_of, run, settings.model, settings.opening, weights=settings.weights)
        planner = TargetPlanner(session, run, settings.target, settings.held_out, opened)
        if settings.frontier:
            _require_storable(planner, table, settings.choosing)
            metric = _metric(planner, table, settings.choosing)
            problem = _problem(
                planner, table, settings.choosing, metric=metric, fixed_bytes=planner.fixed_bytes
            )
            return PlanResult(table, frontier=planning.frontier(problem))
        run.note_command(["kl-lens", *of.command_of(settings)])
        return finished(
            planner, table, _made(settings, planner, table), rivals=settings.rivals, verify=settings.verify,
            tune=settings.tune, tool=settings.write_recipe, known=settings.plan,
        )  # fmt: skip


def table_within(run: Run, target: str | None, limits: Limits) -> SensitivityTable:
    """The measurements for plans within limits. A staged search has measured what plans of its own limit use; others
    may use what was only predicted."""
    known = (run.load(SCREENED, run.measured_role(target)) or {}).get("limit")
    return run.table(target=target, predicted=limits.given != known)


def finished(
    planner: TargetPlanner,
    table: SensitivityTable,
    plans: list[Plan],
    *,
    rivals: str | None = None,
    verify: bool = False,
    tune: int | None = None,
    tool: str | None = None,
    known: str | None = None,
) -> PlanResult:
    """Tunes, measures and writes plans. `rivals`: stock recipes beside them, USUAL or ALL; `tool`: also for this one;
    `known`: the plan that is not new."""
    run, note = planner.run, planner.session.events.note
    for each in plans:
        if predicted := each.notes.get("predicted"):
            note(
                f"{each.name}: the KL of {len(predicted)} of {len(each.assignment)} components was predicted, not "
                "measured; kl-lens measure with this limit measures them"
            )
    if tune:
        plans = [with_tuning(each, tune, planner) for each in plans]
    if rivals and not plans and not verify:
        plans = planner.rivals(table, None, everything=rivals == ALL)
    elif rivals:
        plans = planner.beside_rivals(table, plans, everything=rivals == ALL)
    elif verify:
        factor = planner.interaction(table, plans) if planner.target else 1.0
        plans = [planner.verified(each, table, factor) for each in plans]
    if planner.target:
        planning.store_fixed_bytes(run, planner.target, planner.fixed_bytes)
    for each in plans:
        if each.name != known:
            _say_replaced(planner, each)
        planning.write_plan(each, planning.plan_path(run.folder / "plans", each.name), table.components)
    handovers = [handed_over(planner, each, tool) for each in plans] if tool else []
    for text in (text for each in handovers for text in each.notes):
        note(text)
    return PlanResult(table, plans, run.folder / "plans", handovers=handovers)


def handed_over(planner: TargetPlanner, plan: Plan, tool: str) -> Handover:
    """The plan for another tool, in RUN/recipes."""
    folder = planner.run.folder
    place = folder / RECIPES / f"{plan.name}.{tool}"
    return write_recipe(tool, planner.model, plan, place, StoredStatistics.held_by(folder))


def _read(run: Run, name: str, table: SensitivityTable) -> Plan:
    return planning.read_plan(planning.plan_path(run.folder / "plans", name), table.components)


def _say_replaced(planner: TargetPlanner, plan: Plan) -> None:
    """A name that is used again means another plan from now on; files keep the old one until they are exported."""
    run = planner.run
    with suppress(PlanError):  # none, or one that cannot be read
        earlier = _read(run, plan.name, run.table())
        before, now = (plan_digest(each.assignment, None, each.statistics) for each in (earlier, plan))
        if before != now:
            old = [str(place) for (_, name), place in exported_places(run).items() if name == plan.name]
            kept = f"; until the next export, the earlier one stays in {' and '.join(old)}" if old else ""
            planner.session.events.tell(f"{plan.name} replaces another plan of this name{kept}")


def _made(settings: PlanSettings, planner: TargetPlanner, table: SensitivityTable) -> list[Plan]:
    choosing, limits = settings.choosing, settings.limits
    if settings.plan:
        named = _read(planner.run, settings.plan, table)
        return [planning.repredicted(named, table) if named.edited else named]
    made: list[Plan] = []
    if settings.paper is not None:
        made += published_points(planner, table, settings.paper, choosing)
    made += [planning.uniform_plan(table, fmt, no_head=choosing.no_head) for fmt in settings.uniform]
    gamma = settings.gamma if settings.gamma is not None else settings.gamma_exhaustive
    if gamma is not None:
        _require_storable(planner, table, choosing)
        result = greedy_plan(
            table, planner.halves[0].perplexity, gamma=gamma, metric=_metric(planner, table, choosing),
            exhaustive=settings.gamma_exhaustive is not None, no_head=choosing.no_head, name=choosing.name,
        )  # fmt: skip
        planner.session.events.note(
            f"greedy: {result.evaluations} evaluations of perplexity; the original's is {result.baseline:.3f}, "
            f"the plan's {result.perplexity:.3f}"
        )
        made.append(result.plan)
    budgets = {"max_bpw": settings.max_bpw, "max_kl": settings.max_kl, "min_speed": settings.min_speed}
    if limits.given or any(budget is not None for budget in budgets.values()):
        made.append(plan_within(planner, table, limits, choosing, minimise=settings.minimise, **budgets))
    return [each if each.target else planner.sized(each) for each in made]


def published_points(
    planner: TargetPlanner, table: SensitivityTable, pipeline: str, choosing: Choosing
) -> list[Plan]:
    """The paper's points; `pipeline`: cpu, gpu or gpu-int4."""
    metric = choosing.metric or PUBLISHED_METRIC
    points = paper_points(table, metric=metric, pipeline=pipeline, no_head=choosing.no_head)
    unmeasured = planning.Predictor(table).unmeasured
    uniform = [set(unmeasured(point.assignment)) for point in points if point.family == "uniform"]
    for name in sorted(set.intersection(*uniform)):
        planner.session.events.warn(f"{name} was never measured; the paper's points leave it at FP16")
    return points


def plan_within(
    planner: TargetPlanner,
    table: SensitivityTable,
    limits: Limits,
    choosing: Choosing | None = None,
    *,
    max_bpw: float | None = None,
    max_kl: float | None = None,
    min_speed: float | None = None,
    minimise: str | None = None,
) -> Plan:
    """The smallest plan within a measured loss, or the one with the least predicted loss (or bytes, or time) within the
    other limits, counting the target's file."""
    choosing, target, events = choosing or Choosing(), planner.target, planner.session.events
    _require_storable(planner, table, choosing)
    if loss := limits.loss:  # on both halves of the held-out text
        found = planning.plan_for_loss(
            _problem(planner, table, choosing), lambda plan: planner.lost(plan, loss),
            max_loss=nats_allowed(loss), name=choosing.name,
        )  # fmt: skip
        asked = spell_share(loss["drop"]) if "drop" in loss else f"{loss['loss']:g} nats"
        events.note(
            f"target {asked}: {found.evaluations} plans measured; the smallest that fits loses at most "
            f"{found.loss:.4g} nats per token, one standard error included, on each half of "
            f"{planner.halves[0].text.label}"
        )
        return planner.sized(replace(found.plan, limits=loss))
    max_bytes, metric, speed = limits.max_bytes, _metric(planner, table, choosing), None
    if target is not None and (min_speed is not None or minimise == "seconds"):
        speed = planning.speed_model(planner.run, table, target)
    solutions: list[planning.BudgetSolution] = []

    def make(fixed_bytes: int) -> Plan:
        problem = _problem(planner, table, choosing, metric=metric, speed=speed, fixed_bytes=fixed_bytes)
        solution = planning.plan_for_budget(
            problem, max_bytes=max_bytes, max_bpw=max_bpw, max_kl=max_kl, min_speed=min_speed,
            minimise=minimise, name=choosing.name,
        )  # fmt: skip
        solutions.append(solution)
        return solution.plan

    # The solver adds up upper bounds; a stock recipe's file is measured to the byte and may fit where the bounds do
    # not. With other limits or another goal only the solver knows what is best.
    others: list[Plan] = []
    bytes_alone = max_bytes is not None and not any(x is not None for x in (max_bpw, max_kl, min_speed))
    if target is not None and bytes_alone and minimise in (None, "kl"):
        stock = [one.assignment for one in target.stock_recipes(planner.model)]
        problem = _problem(planner, table, choosing, metric=metric, keep_fused=False)
        others = [
            planning.finished_plan(table, "stock", each, OUR_STOCK, predictor=problem.predictor)
            for each in planning.stock_with_our_methods(problem, stock)
        ]
    plan = planner.fitted(make, max_bytes, others)
    solution = next((each for each in solutions if each.plan.assignment == plan.assignment), solutions[-1])
    proof = "proven optimal" if solution.gap == 0 else f"within {solution.gap:.2e} of the optimum"
    events.note(f"least {solution.minimised} within the budget: {proof}, in {solution.seconds:.2f} s")
    if plan.made_by == OUR_STOCK:
        events.note(f"{OUR_STOCK} fits and is predicted to lose less; it is used instead")
    if speed is None:
        return plan
    events.note(f"about {human_speed(solution.totals.seconds)}, predicted {speed.basis}")
    return replace(plan, notes=plan.notes | {"speed": speed.basis})


def _problem(
    planner: TargetPlanner, table: SensitivityTable, choosing: Choosing, **how: Any
) -> planning.Problem:
    recipes = choosing.formats or None
    return planning.build_problem(
        table, target=planner.target, recipes=recipes, no_head=choosing.no_head, **how
    )


def _require_storable(planner: TargetPlanner, table: SensitivityTable, choosing: Choosing) -> None:
    """Otherwise the only plan would be FP16."""
    target, chosen = planner.target, choosing.formats or table.formats
    if target is None or set(chosen) == {FP16}:
        return
    grids = [get_format(name.partition("+")[0]) for name in chosen if name != FP16]
    if not any(target.holds(grid, c.shape) is None for grid in grids for c in table.candidates):
        raise PlanError(
            f"{target.title} can store none of the measured formats ({', '.join(chosen)}); repeat kl-lens "
            f"measure with --target {target.name} instead of --formats"
        )


def _metric(planner: TargetPlanner, table: SensitivityTable, choosing: Choosing) -> str:
    """--metric, or the metric that predicts damage best here; warns if it is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if choosing.metric is None and why is not None:
        planner.session.events.warn(why)
    return choosing.metric or metric
