"""`plan`: which component gets which format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.calibration import StoredStatistics
from kl_lens.errors import PlanError
from kl_lens.handover import TOOLS, Handover, write_recipe
from kl_lens.paper import PUBLISHED_METRIC, RANKING_METRICS, greedy_plan, paper_points
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.rivals import ALL, USUAL, with_rivals
from kl_lens.pipeline.settings import (
    COUNT,
    NAMES,
    SHARE,
    SIZE,
    TIME,
    FromDisk,
    HeldOut,
    OfRun,
    command_of,
    grouped,
    option,
)
from kl_lens.pipeline.target_planner import TargetPlanner, verified
from kl_lens.pipeline.tuning import WINDOWS as TUNING_WINDOWS, with_tuning
from kl_lens.pipeline.workbench import Workbench
from kl_lens.records import Plan, SensitivityTable, checked_plan_name
from kl_lens.runs import RECIPES, SCREENED, Run
from kl_lens.targets import TARGETS, SessionSettings, describe_target
from kl_lens.targets.latency import PROTOCOL_KIND, other_conditions
from kl_lens.units import human_seconds, spell_share

_paper = grouped("the paper's points")
_quality = grouped("greedy under a quality budget")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("measuring on held-out text")
OUR_STOCK = "a stock recipe with our methods"
KL = "kl_teacher_to_student"
_LOSSES, _GAMMAS = ("max_loss", "max_drop"), ("gamma", "gamma_exhaustive")
# Flags that make no new plan, and why.
_LOOKS = {
    "--frontier": "shows every size, so it takes no limit",
    "--plan": "names an existing plan and makes none",
    "--compare": "shows existing plans and makes none",
}


def check_held_out(windows: int, *, searches: bool) -> None:
    """`searches`: plans are measured until mean + standard error of the loss fits."""
    if searches and windows < 3:
        raise PlanError(
            f"--held-out-windows {windows}: --max-loss and --max-drop need at least 3; "
            "the first half is used for the search and needs two windows for a standard error"
        )
    if windows < 2:
        raise PlanError("--held-out-windows must be at least 2: one half decides, the other confirms")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(HeldOut, FromDisk, OfRun):
    verb: ClassVar[str] = "plan"

    paper: bool = _paper(False, "uniform INT8 and INT4, and points 01 to 10")
    gpu: bool = _paper(False, "the GPU pipeline: INT8 or FP16", excludes="pipeline")
    gpu_int4: bool = _paper(False, "the GPU pipeline with INT4", excludes="pipeline")
    metric: str | None = _paper(
        None,
        f"metric that ranks components (default: {PUBLISHED_METRIC} for the paper's points, otherwise {KL})",
        choices=tuple(RANKING_METRICS),
    )
    no_head: bool = option(False, "keep the head in FP16, as the published models do")
    uniform: tuple[str, ...] = option(
        (),
        "one plan per format, the same for all components; for example fp16,int8",
        kind=NAMES,
        metavar="FORMATS",
    )
    gamma: float | None = _quality(
        None, "quantize while held-out perplexity ≤ G × the original's", metavar="G", excludes="gamma"
    )
    gamma_exhaustive: float | None = _quality(
        None, "the same, one component at a time, as in the paper", metavar="G", excludes="gamma"
    )
    max_bytes: int | None = _budget(None, "for example 90MB; with --target, the size of its file", kind=SIZE)
    max_bpw: float | None = _budget(None, "bits per weight, over all weights", metavar="BITS")
    max_kl: float | None = _budget(None, "predicted KL per token", metavar="NATS")
    max_loss: float | None = _budget(
        None,
        "the smallest plan with a measured held-out KL of at most this, for example 0.01",
        metavar="NATS",
        excludes="loss",
    )
    max_drop: float | None = _budget(
        None,
        "the smallest plan with a measured rise of held-out perplexity of at most this, for example 3%",
        kind=SHARE,
        excludes="loss",
    )
    max_latency: float | None = _budget(
        None, "time per token, for example 12ms; needs kl-lens benchmark --layers", kind=TIME
    )
    profile: str | None = _budget(None, "latency profile of the run (default: the last)", metavar="NAME")
    minimise: str | None = _budget(
        None, "default: the one without a limit", choices=("bytes", "kl", "latency")
    )
    formats: tuple[str, ...] = _budget((), "comma-separated (default: all measured formats)", kind=NAMES)
    frontier: bool = _budget(
        False, "print the Pareto frontier of bytes and KL; with --profile also of tokens per second"
    )
    verify: bool = _proof(False, "measure the whole plan")
    rivals: str | None = _proof(
        None,
        "also measure the target's stock recipes, such as Q4_K_M; one that is no larger and not measurably worse "
        "replaces the plan (usual: a few of them; without a value: all)",
        choices=(USUAL, ALL),
        nargs="?",
        bare=ALL,
    )
    tune: int | None = _proof(
        None,
        "also tune the scales with gradients, so that the KL on calibration text falls; kept if it falls on held-out "
        f"text too (default: {TUNING_WINDOWS} windows)",
        kind=COUNT,
        nargs="?",
        bare=TUNING_WINDOWS,
        metavar="WINDOWS",
    )
    held_out: str = _proof("wikitext2:valid", "text that plans are measured on", metavar="TEXT")
    held_out_windows: int = _proof(32, "number of windows", kind=COUNT)
    target: str | None = option(
        None,
        "plan for this target: its formats, its measurements, the size of its files",
        choices=TARGETS,
    )
    plan: str | None = option(
        None, "a plan of the run to --verify or to compare with --rivals", metavar="NAME"
    )
    compare: tuple[str, ...] = option((), "show plans side by side", nargs="+", metavar="NAME")
    name: str | None = option(None, "name of the new plan")
    write_recipe: str | None = option(
        None,
        f"also write the plan for another tool, to RUN/recipes: {', '.join(TOOLS)}",
        choices=tuple(TOOLS),
        metavar="TOOL",
    )
    dry_run: bool = option(False, "print without writing")

    @property
    def budgets(self) -> dict[str, Any]:
        names = ("max_bytes", "max_bpw", "max_kl", "max_latency")
        return {name: getattr(self, name) for name in names}

    @property
    def limits(self) -> list[str]:
        return self._given(*self.budgets, *_LOSSES, *_GAMMAS)

    def _given(self, *names: str) -> list[str]:
        """The flags among these that are set. (A limit of 0 counts.)"""
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        return [flag for flag, value in values.items() if value is not False and value not in (None, ())]

    def check(self) -> None:
        super().check()
        losses, budgets, gammas = self._given(*_LOSSES), self._given(*self.budgets), self._given(*_GAMMAS)
        new = [*self._given("paper", "gpu", "gpu_int4", "uniform"), *self.limits]
        looks = self._given("frontier", "plan", "compare")
        if len(looks) > 1:
            raise PlanError(f"{' and '.join(looks)}: give only one of them")
        if looks and new:
            raise PlanError(f"{looks[0]} {_LOOKS[looks[0]]}: leave out {', '.join(new)}, or {looks[0]}")
        if not looks and not new and not self.rivals:
            raise PlanError(
                "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-loss, "
                "--max-drop, --max-latency, --rivals or --frontier; or name a plan with --plan to --verify it"
            )
        if losses and budgets:
            raise PlanError(
                f"{losses[0]} searches for the smallest plan by itself: leave out {', '.join(budgets)}, or {losses[0]}"
            )
        if self.name is not None:
            checked_plan_name(self.name)
            if bool(gammas) + bool(losses or budgets) != 1:
                raise PlanError(
                    f"--name {self.name} names one plan made by a limit: give it with --max-bytes, --max-loss, "
                    "--gamma or another limit"
                )
        if self.write_recipe and (silent := self._given("frontier", "compare", "dry_run")):
            raise PlanError(
                f"--write-recipe writes a plan, and {silent[0]} writes none: leave one of them out"
            )
        if self.rivals and self.target is None:
            raise PlanError("--rivals compares with the stock recipes of a target: name it with --target")
        if self.tune and (silent := self._given("frontier", "compare", "dry_run")):
            raise PlanError(f"--tune changes a plan's weights, and {silent[0]} writes none: leave one out")
        if losses or gammas or self.verify or self.rivals or self.tune:
            check_held_out(self.held_out_windows, searches=bool(losses))

    @property
    def choice(self) -> dict[str, Any]:
        """Arguments of every planner."""
        return {"recipes": self.formats or None, "no_head": self.no_head}


@dataclass(frozen=True)
class PlanResult:
    """Plans that were made or compared, or a frontier."""

    table: SensitivityTable
    plans: list[Plan] = field(default_factory=list)
    written_to: Path | None = None
    differences: Sequence[planning.Difference] | None = None  # of --compare
    frontier: planning.Frontier | None = None
    surface: Sequence[planning.SurfacePoint] | None = None  # a frontier with speeds
    handovers: Sequence[Handover] = ()  # of --write-recipe


def plan(settings: PlanSettings, bench: Workbench, events: Events) -> PlanResult:
    with Run.open(settings.run_folder) as run:
        table = run.table(target=settings.target)
        folder = run.folder / "plans"
        if settings.compare:
            plans = [_read(folder, name, table) for name in settings.compare]
            return PlanResult(table, plans, differences=planning.compare(plans, table.components).differences)
        planner = TargetPlanner(settings, run, bench)
        if settings.frontier:
            return _frontier(settings, run, table, planner, events)
        if not settings.dry_run:
            run.note_command(["kl-lens", *command_of(settings)])
        _warn_of_another_limit(settings, run, events)
        plans = _made(settings, run, table, planner, events)
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
            planning.write_plan(each, planning.plan_path(folder, each.name), table.components)
        handovers = (
            _handed_over(settings.write_recipe, plans, planner, run, events) if settings.write_recipe else ()
        )
        return PlanResult(table, plans, folder, handovers=handovers)


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


def _warn_of_another_limit(settings: PlanSettings, run: Run, events: Events) -> None:
    """A staged search measured what plans near its own limit use."""
    known = (run.load(SCREENED, run.measured_role(settings.target)) or {}).get("limit")
    names = ("max_bytes", "max_loss", "max_drop")
    asked = {name: value for name in names if (value := getattr(settings, name)) is not None}
    if known and asked and asked != known:
        events.warn(
            "the run measured what plans of another limit use; for the best plan of this one, first repeat kl-lens "
            "measure with this limit, or with --exhaustive"
        )


def _frontier(
    settings: PlanSettings, run: Run, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> PlanResult:
    latency = _latency(settings, run, events)[1] if settings.profile else None
    problem = planning.build_problem(
        table,
        latency=latency,
        metric=_metric(settings, table, events),
        target=planner.target,
        fixed_bytes=planner.fixed_bytes,
        **settings.choice,
    )
    if latency is not None:
        return PlanResult(table, surface=planning.pareto_surface(problem))
    return PlanResult(table, frontier=planning.pareto_frontier(problem))


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
    """The smallest plan within a measured loss: of KL, or of perplexity."""
    meter = planner.halves[0]

    # Add one standard error: on little text the plan would otherwise be too small.
    def lost_perplexity(assignment: Mapping[str, str]) -> float:
        effect = meter.measure(assignment)
        change = effect.delta_cross_entropy
        return change.value + change.standard_error

    def lost_kl(assignment: Mapping[str, str]) -> float:
        kl = meter.measure(assignment).kl
        return kl.value + kl.standard_error

    if settings.max_drop is not None:
        asked, loss, allowed = spell_share(settings.max_drop), lost_perplexity, math.log1p(settings.max_drop)
        limits = {"drop": settings.max_drop}
    else:
        assert settings.max_loss is not None
        asked, loss, allowed = f"{settings.max_loss:g} nats", lost_kl, settings.max_loss
        limits = {"loss": settings.max_loss}
    result = planning.plan_for_loss(
        table, loss, max_loss=allowed, name=settings.name, target=planner.target, **settings.choice
    )
    events.note(
        f"target {asked}: {result.evaluations} plans measured; the smallest that fits loses {result.loss:.4g} nats "
        f"per token, one standard error included, on {meter.text.label}"
    )
    return replace(result.plan, limits=limits)


def plan_within_budget(
    settings: PlanSettings, run: Run, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> Plan:
    """The plan with the least predicted loss (or bytes, or time) within the limits, counting the target's file."""
    timed = settings.max_latency or settings.minimise == "latency" or settings.profile
    profile, latency = _latency(settings, run, events) if timed else (None, None)
    metric = _metric(settings, table, events)
    solutions: list[planning.BudgetSolution] = []

    def make(fixed_bytes: int) -> Plan:
        solutions.append(
            planning.plan_for_budget(
                table,
                latency=latency,
                minimise=settings.minimise,
                metric=metric,
                name=settings.name,
                target=planner.target,
                fixed_bytes=fixed_bytes,
                **settings.budgets,
                **settings.choice,
            )
        )
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
    if profile is None or plan.made_by == OUR_STOCK:
        return plan
    events.note(f"{human_seconds(solution.totals.seconds)} per token, by the latency table {profile}")
    return replace(plan, notes=plan.notes | {"latency_table": profile})


def _our_stock_plans(
    settings: PlanSettings, table: SensitivityTable, planner: TargetPlanner, metric: str
) -> list[Plan]:
    """The target's stock recipes with our methods."""
    assert planner.target is not None
    stock = planner.target.stock_recipes(planner.model)
    made = planning.stock_with_our_methods(
        table, [one.assignment for one in stock], target=planner.target, metric=metric, **settings.choice
    )
    predictor = planning.Predictor(table, metric)
    return [
        planning.finished_plan(table, "stock", assignment, OUR_STOCK, predictor=predictor)
        for assignment in made
    ]


def _latency(settings: PlanSettings, run: Run, events: Events) -> tuple[str, planning.LatencyTable]:
    """A latency profile and its name with the conditions it was measured in."""
    name, target = settings.profile, settings.target
    profiles = planning.latency_profiles(run, target)
    if not profiles:
        whose = f" of {target}" if target else ""
        raise PlanError(
            f"{run.folder} holds no latency profile{whose}; make one with: kl-lens benchmark --layers"
        )
    if name is not None and name not in profiles:
        raise PlanError(f"no latency profile {name!r}; the run has {', '.join(profiles)}")
    name = name or list(profiles)[-1]
    known = (run.load(PROTOCOL_KIND, name) or {}).get("conditions")
    owner = name.partition("-")[0]
    here = describe_target(owner).conditions(SessionSettings()) if owner in TARGETS else {}
    # Threads are not compared: a plan may be made on another machine than the one it runs on.
    if other := other_conditions(known, {key: here[key] for key in ("runtime", "processor") if key in here}):
        events.warn(
            f"latency table {name} was measured with {other}; make one here with: kl-lens benchmark --layers"
        )
    told = f" ({known['threads']} thread(s), {known['runtime']}, {known['processor']})" if known else ""
    return name + told, profiles[name]


def _metric(settings: PlanSettings, table: SensitivityTable, events: Events) -> str:
    """--metric, or the metric that predicts damage best here; warns if it is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if settings.metric is None and why is not None:
        events.warn(why)
    return settings.metric or metric
