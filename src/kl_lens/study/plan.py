"""`plan`: which component gets which format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kl_lens import planning
from kl_lens.base.errors import PlanError
from kl_lens.base.units import human_speed, spell_share
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.paper import PUBLISHED_METRIC, greedy_plan, paper_points
from kl_lens.planning.handover import TOOLS, Handover, write_recipe
from kl_lens.run.folder import RECIPES, SCREENED, Run
from kl_lens.run.records import Plan, SensitivityTable, checked_plan_name
from kl_lens.run.subjects import plan_digest
from kl_lens.study.events import Events
from kl_lens.study.planner import KL, TargetPlanner, nats_allowed, verified, with_rivals
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    COUNT,
    DEFAULT_RUN,
    NAMES,
    SHARE,
    SIZE,
    HeldOut,
    Opening,
    Settings,
    command_of,
    group,
    grouped,
    moved_model,
    of_run,
    option,
    place_of_weights,
    values_of,
)
from kl_lens.study.tune import with_tuning
from kl_lens.targets import TARGETS, exported_places
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import FP16, Recipe

OUR_STOCK = "a stock recipe with our methods"
_paper = grouped("the paper's points")
_quality = grouped("greedy under a quality budget")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("measuring on held-out text")
ALL, USUAL = "all", "usual"  # values of --rivals
TUNING_WINDOWS = 2048
_LOSSES, _GAMMAS = ("--max-loss", "--max-drop"), ("--gamma", "--gamma-exhaustive")
_BUDGETS = ("--max-bytes", "--max-bpw", "--max-kl", "--min-speed")
# Flags that make no new plan, and why.
_LOOKS = {
    "--frontier": "shows every size, so it takes no limit",
    "--plan": "names an existing plan and makes none",
    "--compare": "shows existing plans and makes none",
}


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    verb: ClassVar[str] = "plan"

    run: str | None = of_run()
    model: str | None = moved_model()
    opening: Opening = group(Opening)
    weights: str = place_of_weights()
    paper: str | None = _paper(
        None,
        "uniform INT8 and INT4, and points 01 to 10 (gpu: of INT8 and FP16; gpu-int4: with INT4)",
        choices=("cpu", "gpu", "gpu-int4"),
        nargs="?",
        bare="cpu",
    )
    metric: str | None = _paper(
        None,
        f"minimise this (default: {PUBLISHED_METRIC} for the paper's points, otherwise {KL}): mse, "
        "delta_cross_entropy, another objective that was measured, or for the paper's points sqnr",
        metavar="NAME",
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
    min_speed: float | None = _budget(
        None,
        "predicted tokens per second of the --target's file, for example 30; run kl-lens benchmark first",
        metavar="TOKENS",
    )
    minimise: str | None = _budget(
        None,
        "default: the one without a limit (seconds: per token)",
        choices=("bytes", "kl", "seconds"),
    )
    formats: tuple[str, ...] = _budget((), "comma-separated (default: all measured formats)", kind=NAMES)
    frontier: bool = _budget(False, "print the Pareto frontier of bytes and KL")
    verify: bool = _proof(False, "measure the whole plan")
    rivals: str | None = _proof(
        None,
        "also measure the target's stock recipes, such as Q4_K_M; one that is no larger and not worse replaces the "
        "plan (usual: a few of them; without a value: all)",
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
    held_out: HeldOut = group(HeldOut)
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

    def check(self) -> None:
        super().check()
        losses, budgets, gammas = self._given(*_LOSSES), self._given(*_BUDGETS), self._given(*_GAMMAS)
        new = [*self._given("--paper", "--uniform"), *budgets, *losses, *gammas]
        looks = self._given(*_LOOKS)
        if len(looks) > 1:
            raise PlanError(f"{' and '.join(looks)}: give only one of them")
        if looks and new:
            raise PlanError(f"{looks[0]} {_LOOKS[looks[0]]}: leave out {', '.join(new)}, or {looks[0]}")
        if not looks and not new and not self.rivals:
            raise PlanError(
                "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-loss, "
                "--max-drop, --min-speed, --rivals or --frontier; or name a plan with --plan to --verify it"
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
        if (writes := self._given("--write-recipe", "--tune")) and (
            silent := self._given("--frontier", "--compare")
        ):
            raise PlanError(f"{writes[0]} needs a plan, and {silent[0]} makes none: leave one of them out")
        if (self.min_speed is not None or self.minimise == "seconds") and self.target is None:
            raise PlanError(
                "--min-speed and --minimise seconds are about a target's files: name it with --target"
            )
        if self.rivals and self.target is None:
            raise PlanError("--rivals compares with the stock recipes of a target: name it with --target")
        if losses or gammas or self.verify or self.rivals or self.tune:
            self.held_out.check(searches=bool(losses))

    @property
    def has_limit(self) -> bool:
        return bool(self._given(*_BUDGETS, *_LOSSES, *_GAMMAS))

    def _given(self, *flags: str) -> list[str]:
        """Those of these flags that are set. (A limit of 0 counts.)"""
        values = {each.flag: value for each, value in values_of(self)}
        return [f for f in flags if values[f] is not False and values[f] not in (None, ())]


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
    events = session.events
    with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
        asked = {
            "max_bytes": settings.max_bytes,
            "max_loss": settings.max_loss,
            "max_drop": settings.max_drop,
        }
        # A staged search has measured what plans of its own limit use; others may use what was only predicted.
        known = (run.load(SCREENED, run.measured_role(settings.target)) or {}).get("limit")
        other = settings.has_limit and {k: v for k, v in asked.items() if v is not None} != known
        table = run.table(target=settings.target, predicted=settings.frontier or other)
        folder = run.folder / "plans"
        if settings.compare:
            plans = [_read(folder, name, table) for name in settings.compare]
            return PlanResult(table, plans, differences=planning.differences(plans, table.components))
        planner = TargetPlanner(
            session, run, settings.target, settings.held_out,
            model=settings.model, opening=settings.opening, weights=settings.weights,
        )  # fmt: skip
        if settings.frontier:
            _require_storable(settings.formats, table, planner)
            problem = planning.build_problem(
                table, metric=_metric(settings.metric, table, events), target=planner.target,
                fixed_bytes=planner.fixed_bytes, recipes=settings.formats or None, no_head=settings.no_head,
            )  # fmt: skip
            return PlanResult(table, frontier=planning.frontier(problem))
        run.note_command(["kl-lens", *command_of(settings)])
        plans = _made(settings, run, table, planner, events)
        for each in plans:
            if predicted := each.notes.get("predicted"):
                events.note(
                    f"{each.name}: the KL of {len(predicted)} of {len(each.assignment)} components was predicted, not "
                    "measured; kl-lens measure with this limit measures them"
                )
        if settings.tune:
            plans = [with_tuning(each, settings.tune, run, planner, session) for each in plans]
        if settings.rivals:
            plans = with_rivals(
                planner, table, plans, events, everything=settings.rivals == ALL, verify=settings.verify
            )
        elif settings.verify:
            factor = planner.interaction(table, plans) if planner.target else 1.0
            plans = [verified(each, table, planner.halves[1], events, factor) for each in plans]
        if planner.target:
            planning.store_fixed_bytes(run, planner.target, planner.fixed_bytes)
        for each in plans:
            path = planning.plan_path(folder, each.name)
            if each.name != settings.plan:
                _say_replaced(path, each, run, events)
            planning.write_plan(each, path, table.components)
        handovers = []
        if (tool := settings.write_recipe) is not None:
            statistics, place = StoredStatistics.held_by(run.folder), run.folder / RECIPES
            for each in plans:
                made = write_recipe(tool, planner.model, each, place / f"{each.name}.{tool}", statistics)
                handovers.append(made)
                for note in made.notes:
                    events.note(note)
        return PlanResult(table, plans, folder, handovers=handovers)


def _read(folder: Path, name: str, table: SensitivityTable) -> Plan:
    return planning.read_plan(planning.plan_path(folder, name), table.components)


def _made(
    settings: PlanSettings, run: Run, table: SensitivityTable, planner: TargetPlanner, events: Events
) -> list[Plan]:
    if settings.plan:
        plan = _read(run.folder / "plans", settings.plan, table)
        return [planning.repredicted(plan, table) if plan.edited else plan]
    made: list[Plan] = []
    if settings.paper is not None:
        metric = settings.metric or PUBLISHED_METRIC
        points = paper_points(table, metric=metric, pipeline=settings.paper, no_head=settings.no_head)
        unmeasured = planning.Predictor(table).unmeasured
        uniform = [set(unmeasured(point.assignment)) for point in points if point.family == "uniform"]
        for name in sorted(set.intersection(*uniform)):
            events.warn(f"{name} was never measured; the paper's points leave it at FP16")
        made += points
    made += [planning.uniform_plan(table, name, no_head=settings.no_head) for name in settings.uniform]
    limits = settings.max_bytes, settings.max_bpw, settings.max_kl, settings.min_speed
    losses = settings.max_drop, settings.max_loss
    gamma = settings.gamma if settings.gamma is not None else settings.gamma_exhaustive
    if gamma is not None or any(limit is not None for limit in (*limits, *losses)):
        _require_storable(settings.formats, table, planner)
    if gamma is not None:
        metric = _metric(settings.metric, table, events)
        exhaustive = settings.gamma_exhaustive is not None
        result = greedy_plan(
            table, planner.halves[0].perplexity,
            gamma=gamma, exhaustive=exhaustive, metric=metric, no_head=settings.no_head, name=settings.name,
        )  # fmt: skip
        events.note(
            f"greedy: {result.evaluations} evaluations of perplexity; the original's is {result.baseline:.3f}, "
            f"the plan's {result.perplexity:.3f}"
        )
        made.append(result.plan)
    if settings.max_drop is not None or settings.max_loss is not None:
        # The smallest plan within a measured loss, of KL or of perplexity, on both halves of the held-out text.
        loss = (
            {"drop": settings.max_drop}
            if settings.max_drop is not None
            else {"loss": settings.max_loss or 0.0}
        )
        problem = planning.build_problem(
            table, target=planner.target, recipes=settings.formats or None, no_head=settings.no_head
        )
        found = planning.plan_for_loss(
            problem,
            lambda assignment: planner.lost(assignment, loss),
            max_loss=nats_allowed(loss),
            name=settings.name,
        )
        asked = spell_share(loss["drop"]) if "drop" in loss else f"{loss['loss']:g} nats"
        events.note(
            f"target {asked}: {found.evaluations} plans measured; the smallest that fits loses at most "
            f"{found.loss:.4g} nats per token, one standard error included, on each half of "
            f"{planner.halves[0].text.label}"
        )
        made.append(replace(found.plan, limits=loss))
    elif any(limit is not None for limit in limits):
        plan = plan_within_budget(
            planner, run, table, events,
            max_bytes=settings.max_bytes, max_bpw=settings.max_bpw, max_kl=settings.max_kl,
            min_speed=settings.min_speed, minimise=settings.minimise, metric=settings.metric,
            formats=settings.formats, no_head=settings.no_head, name=settings.name,
        )  # fmt: skip
        made.append(plan)
    return [each if each.target else planner.sized(each) for each in made]


def _require_storable(formats: Sequence[str], table: SensitivityTable, planner: TargetPlanner) -> None:
    """Otherwise the only plan would be FP16."""
    target, chosen = planner.target, formats or table.formats
    if target is None or set(chosen) == {FP16}:
        return
    grids = [get_format(name.partition("+")[0]) for name in chosen if name != FP16]
    if not any(target.holds(grid, c.shape) is None for grid in grids for c in table.candidates):
        raise PlanError(
            f"{target.title} can store none of the measured formats ({', '.join(chosen)}); repeat kl-lens "
            f"measure with --target {target.name} instead of --formats"
        )


def _say_replaced(path: Path, plan: Plan, run: Run, events: Events) -> None:
    """A name that is used again means another plan from now on; files keep the old one until they are exported."""
    with suppress(PlanError):  # none, or one that cannot be read
        earlier = planning.read_plan(path, run.table().components)
        before, now = (plan_digest(each.assignment, None, each.statistics) for each in (earlier, plan))
        if before != now:
            old = [str(place) for (_, name), place in exported_places(run).items() if name == plan.name]
            kept = f"; until the next export, the earlier one stays in {' and '.join(old)}" if old else ""
            events.fail(f"{plan.name} replaces another plan of this name{kept}")


def plan_within_budget(
    planner: TargetPlanner,
    run: Run,
    table: SensitivityTable,
    events: Events,
    *,
    max_bytes: int | None = None,
    max_bpw: float | None = None,
    max_kl: float | None = None,
    min_speed: float | None = None,
    minimise: str | None = None,
    metric: str | None = None,
    formats: Sequence[str] = (),
    no_head: bool = False,
    name: str | None = None,
) -> Plan:
    """The plan with the least predicted loss (or bytes, or time) within the limits, counting the target's file."""
    speed, target, recipes = None, planner.target, formats or None
    if min_speed is not None or minimise == "seconds":
        assert target is not None
        speed = planning.speed_model(run, table, target)
    by = _metric(metric, table, events)
    solutions: list[planning.BudgetSolution] = []

    def make(fixed_bytes: int) -> Plan:
        problem = planning.build_problem(
            table, speed=speed, metric=by, target=target, fixed_bytes=fixed_bytes, recipes=recipes,
            no_head=no_head,
        )  # fmt: skip
        found = planning.plan_for_budget(
            problem, max_bytes=max_bytes, max_bpw=max_bpw, max_kl=max_kl, min_speed=min_speed,
            minimise=minimise, name=name,
        )  # fmt: skip
        solutions.append(found)
        return found.plan

    # The solver adds up upper bounds; a stock recipe's file is measured to the byte and may fit where the bounds do
    # not. With other limits or another goal only the solver knows what is best.
    others: list[Plan] = []
    bytes_alone = max_bytes is not None and not any(x is not None for x in (max_bpw, max_kl, min_speed))
    if target is not None and bytes_alone and minimise in (None, "kl"):
        stock = [one.assignment for one in target.stock_recipes(planner.model)]
        problem = planning.build_problem(
            table, metric=by, target=target, keep_fused=False, recipes=recipes, no_head=no_head
        )
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


def _metric(asked: str | None, table: SensitivityTable, events: Events) -> str:
    """--metric, or the metric that predicts damage best here; warns if it is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if asked is None and why is not None:
        events.warn(why)
    return asked or metric
