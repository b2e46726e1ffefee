"""`plan`: which component gets which format."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from kl_lens import planning
from kl_lens.base.errors import PlanError, TextError
from kl_lens.base.units import human_bytes, human_speed, spell_share
from kl_lens.judging.choosing import paired_difference
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.tuning import TuningRates, tuned
from kl_lens.planning.points import PIPELINES, PUBLISHED_METRIC, greedy_plan, paper_points
from kl_lens.run.folder import INTERACTION, TUNING, Run
from kl_lens.run.readings import KL
from kl_lens.run.records import (
    EXPORT_OPTIONS,
    Plan,
    SensitivityTable,
    require_own_plan_name,
)
from kl_lens.run.subjects import plan_digest
from kl_lens.study import settings as of
from kl_lens.study.events import going_on
from kl_lens.study.planner import OUR_STOCK, TargetPlanner, nats_allowed
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    ForTargets,
    HeldOut,
    Limits,
    Opening,
    group,
    grouped,
    option,
    with_options,
)
from kl_lens.targets import exported_places
from kl_lens.text.windows import Windows, refuse_overlap
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.scales import scales_of
from kl_lens.weights.quantizers import TUNED
from kl_lens.weights.recipes import FP16, Recipe, parsed

ALL = "all"
USUAL = "usual"  # values of --rivals
BUDGETS = ("max_bpw", "min_speed", "minimise")
SEARCHES = ("gamma", "max_drop")
LIMITS = (*SEARCHES, "max_loss", "max_bytes", "memory", *BUDGETS)
TUNING_WINDOWS = 2048
TUNING_VERSION = 1  # raise it when the same plan and text give other weights
_paper = grouped("the paper's points")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("measuring on held-out text")
tuning = partial(option, None, nargs="?", bare=TUNING_WINDOWS, metavar="WINDOWS")


@with_options
class Choosing:
    """What plans choose from, and by what."""

    metric: of.Name | None = _paper(
        None,
        f"minimise this (default: {PUBLISHED_METRIC} for the paper's points, otherwise {KL}): mse, "
        "delta_cross_entropy, another objective that was measured, or for the paper's points sqnr",
    )
    no_head: bool = option(False, "keep the head in FP16, as the published models do")
    formats: of.Names = _budget((), "comma-separated (default: all measured formats)")
    name: str | None = option(None, "name of the new plan")


@with_options
class Budgets:
    """More limits on what is predicted, and what to minimise within them."""

    max_bpw: float | None = _budget(
        None, "bits per weight, over all weights", metavar="BITS"
    )
    min_speed: float | None = _budget(
        None,
        "predicted tokens per second of the --target's file; run kl-lens benchmark first",
        metavar="TOKENS",
    )
    minimise: str | None = _budget(
        None,
        "default: the one without a limit (seconds: per token)",
        choices=("bytes", "kl", "seconds"),
    )

    @property
    def given(self) -> bool:
        return self != Budgets()

    @property
    def by_speed(self) -> bool:
        return self.min_speed is not None or self.minimise == "seconds"


@with_options
class PlanSettings(ForTargets):
    run: of.Folder | None = of.of_run()
    model: of.Model | None = of.moved_model()
    opening: Opening = group(Opening)
    paper: str | None = _paper(
        None,
        "uniform INT8 and INT4, and points 01 to 10 (gpu: of INT8 and FP16)",
        choices=tuple(PIPELINES),
        nargs="?",
        bare="cpu",
    )
    choosing: Choosing = group(Choosing)
    uniform: of.Names = option(
        (), "a plan per format, for all components, such as int8", metavar="FORMATS"
    )
    gamma: float | None = of.wanted(
        None,
        "the paper's greedy rule: quantize while held-out perplexity ≤ G × the original's",
        metavar="G",
    )
    limits: Limits = group(
        Limits,
        max_loss=of.grouped(of.LIMIT)(
            None,
            "the smallest plan of at most this KL, for example 0.01: alone as measured on held-out text; with another "
            "limit or --minimise as predicted",
            former=("max_kl",),
        ),
    )
    budgets: Budgets = group(Budgets)
    frontier: bool = _budget(
        False, "print the Pareto frontier of bytes and KL", excludes="look"
    )
    verify: bool = _proof(False, "measure the whole plan")
    rivals: str | None = _proof(
        None,
        "also measure the target's stock recipes, such as Q4_K_M; one that is no larger and not worse replaces the "
        "plan (usual: a few of them; without a value: all)",
        choices=(USUAL, ALL),
        nargs="?",
        bare=ALL,
    )
    tune: of.Count | None = tuning(
        "also tune the scales with gradients, so that the KL on calibration text falls; kept if it falls on held-out "
        f"text too (default: {TUNING_WINDOWS} windows)",
        group="measuring on held-out text",
    )
    held_out: HeldOut = group(HeldOut)
    plan: str | None = option(
        None,
        "a plan of the run to --verify or to compare with --rivals",
        excludes="look",
        metavar="NAME",
    )

    def parts(self) -> dict[str, Self]:
        parts = super().parts()
        if self.choosing.name is not None and len(parts) > 1:
            raise PlanError("--name names one plan: give one --target, or no --name")
        return parts

    def check(self) -> None:
        super().check()
        searches, alternatives, limits = (
            self.given(*names) for names in (SEARCHES, ("max_loss", *BUDGETS), LIMITS)
        )
        looks = self.given("frontier", "plan")
        new = self.given("paper", "uniform", *LIMITS)
        if looks and new:
            raise PlanError(
                f"{looks[0]} makes no new plan: leave out {', '.join(new)}, or {looks[0]}"
            )
        if not looks and not new and not self.rivals:
            raise PlanError(
                "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-loss, --max-drop, "
                "--min-speed, --rivals or --frontier; or name a plan with --plan to --verify it"
            )
        if searches and alternatives:
            raise PlanError(
                f"{searches[0]} searches by itself: leave out {', '.join(alternatives)}, or {searches[0]}"
            )
        if (name := self.choosing.name) is not None:
            require_own_plan_name(name)
            if not limits:
                raise PlanError(
                    f"--name {name} names a plan made by a limit, such as --max-bytes"
                )
        if self.frontier and self.tune:
            raise PlanError(
                "--tune needs a plan, and --frontier makes none: leave one of them out"
            )
        about = (
            self.given("min_speed", "rivals", "memory")
            or ["--minimise seconds"] * self.budgets.by_speed
        )
        if self.target is None and about:
            raise PlanError(
                f"{about[0]} is about a target's files: name it with --target"
            )
        self.limits.check()
        measured = self.limits.measured(beside=self.budgets.given)
        if searches or measured or self.verify or self.rivals or self.tune:
            self.held_out.check(searches=bool(measured))

    def given(self, *names: str) -> list[str]:
        """The flags among these that are set. (A limit of 0 is.)"""
        return [
            option.flag
            for option, value in of.values_of(self)
            if option.name in names and value != option.default
        ]


@dataclass(frozen=True)
class PlanResult:
    """Plans that were made or measured, or a frontier."""

    table: SensitivityTable
    plans: list[Plan] = field(default_factory=list)
    written_to: Path | None = None
    frontier: tuple[planning.FrontierPoint, ...] | None = None
    interaction: float = 1.0  # of the frontier

    def cost(self, plan: Plan) -> planning.Cost:
        return planning.cost_of(self.table.components, plan.assignment)


def plan(settings: PlanSettings, session: Session) -> PlanResult:
    with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
        if settings.choosing.name is not None:
            planning.require_distinct(run.folder / "plans", settings.choosing.name)
        opened = partial(
            session.model_of,
            run,
            settings.model,
            settings.opening,
        )
        planner = TargetPlanner(
            session, run, settings.runtime, settings.held_out, opened, settings.limits
        )
        if settings.given(*LIMITS):
            table = planner.table()
        else:
            table = run.table(target=settings.runtime, predicted=settings.frontier)
        if settings.frontier:
            _require_storable(planner, table, settings.choosing)
            options = {
                "metric": settings.choosing.metric or KL,
                "fixed_bytes": planner.fixed_bytes,
            }
            problem = _problem(planner, table, settings.choosing, **options)
            frontier = planning.frontier(problem)
            return PlanResult(table, frontier=frontier, interaction=problem.interaction)
        run.note_command(["kl-lens", *of.command_of(settings)])
        return finished(
            planner,
            table,
            _made(settings, planner, table),
            rivals=settings.rivals,
            verify=settings.verify,
            tune=settings.tune,
            known=settings.plan,
        )


def finished(
    planner: TargetPlanner,
    table: SensitivityTable,
    plans: list[Plan],
    *,
    rivals: str | None = None,
    verify: bool = False,
    tune: int | None = None,
    known: str | None = None,
) -> PlanResult:
    """Tunes, measures and writes plans. `rivals`: stock recipes beside them, USUAL or ALL; `known`: the plan that is
    not new."""
    run = planner.run
    note = planner.session.events.note
    for plan in plans:
        if predicted := plan.notes.get("predicted"):
            note(
                f"{plan.name}: the KL of {len(predicted)} of {len(plan.assignment)} components was predicted, not "
                "measured; kl-lens measure with this limit measures them"
            )
    plans = [planner.corrected(plan) for plan in plans]
    if tune:
        plans = [with_tuning(plan, tune, planner) for plan in plans]
    if rivals and not plans and not verify:
        plans = planner.rivals(table, None, everything=rivals == ALL)
    elif rivals:
        plans = planner.beside_rivals(table, plans, everything=rivals == ALL)
    elif verify:
        factor = 1.0
        if planner.target:
            factor = planner.interaction(table, plans)
            run.store(INTERACTION, planner.target.name, factor)
        plans = [planner.verified(plan, table, factor) for plan in plans]
    if planner.target:
        planning.store_fixed_bytes(run, planner.target, planner.fixed_bytes)
    for plan in plans:
        if plan.name != known:
            _say_replaced(planner, plan)
        planning.write_plan(
            plan, planning.plan_path(run.folder / "plans", plan.name), table.components
        )
    return PlanResult(table, plans, run.folder / "plans")


def _read(run: Run, name: str, table: SensitivityTable) -> Plan:
    return planning.read_plan(
        planning.plan_path(run.folder / "plans", name), table.components
    )


def _say_replaced(planner: TargetPlanner, plan: Plan) -> None:
    """A name that is used again means another plan from now on; files keep the old one until they are exported."""
    run = planner.run
    with suppress(PlanError):  # none, or one that cannot be read
        earlier = _read(run, plan.name, run.table())
        before, after = (
            plan_digest(version.assignment, None, version.statistics)
            for version in (earlier, plan)
        )
        if before != after:
            old = [
                str(folder)
                for (_, name), folder in exported_places(run).items()
                if name == plan.name
            ]
            remark = (
                f"; until the next export, the earlier one stays in {' and '.join(old)}"
                if old
                else ""
            )
            planner.session.events.tell(
                f"{plan.name} replaces another plan of this name{remark}"
            )


def _made(
    settings: PlanSettings, planner: TargetPlanner, table: SensitivityTable
) -> list[Plan]:
    choosing = settings.choosing
    if settings.plan:
        named = _read(planner.run, settings.plan, table)
        return [planning.repredicted(named, table) if named.edited else named]
    plans: list[Plan] = []
    if settings.paper is not None:
        plans += published_points(planner, table, settings.paper, choosing)
    plans += [
        planning.uniform_plan(table, fmt, no_head=choosing.no_head)
        for fmt in settings.uniform
    ]
    if settings.gamma is not None:
        _require_storable(planner, table, choosing)
        result = greedy_plan(
            table,
            planner.halves[0].perplexity,
            gamma=settings.gamma,
            name=choosing.name,
            metric=choosing.metric or KL,
            no_head=choosing.no_head,
        )
        planner.session.events.note(
            f"greedy: {result.evaluations} evaluations of perplexity; the original's is {result.baseline:.3f}, "
            f"the plan's {result.perplexity:.3f}"
        )
        plans.append(result.plan)
    if settings.limits.given or settings.given(*BUDGETS):
        plans.append(plan_within(planner, table, choosing, settings.budgets))
    return [plan if plan.target else planner.sized(plan) for plan in plans]


def published_points(
    planner: TargetPlanner, table: SensitivityTable, pipeline: str, choosing: Choosing
) -> list[Plan]:
    """The paper's points; `pipeline`: cpu or gpu."""
    metric = choosing.metric or PUBLISHED_METRIC
    points = paper_points(
        table, metric=metric, pipeline=pipeline, no_head=choosing.no_head
    )
    unmeasured = planning.Predictor(table).unmeasured
    uniform = [
        set(unmeasured(point.assignment)) for point in points if point.family == "uniform"
    ]
    for name in sorted(set.intersection(*uniform)):
        planner.session.events.warn(
            f"{name} was never measured; the paper's points leave it at FP16"
        )
    return points


def plan_within(
    planner: TargetPlanner,
    table: SensitivityTable,
    choosing: Choosing | None = None,
    budgets: Budgets | None = None,
) -> Plan:
    """The smallest plan within a measured loss, or the one with the least predicted loss (or bytes, or time) within the
    other limits, counting the target's file."""
    choosing = choosing or Choosing()
    budgets = budgets or Budgets()
    target = planner.target
    events = planner.session.events
    limits = planner.limits
    _require_storable(planner, table, choosing)
    if loss := limits.measured(
        beside=budgets.given
    ):  # on both halves of the held-out text
        search = planning.plan_for_loss(
            _problem(planner, table, choosing, interaction=1.0),
            lambda plan: planner.lost(plan, loss),
            max_loss=nats_allowed(loss),
            name=choosing.name,
        )
        limit = spell_share(loss["drop"]) if "drop" in loss else f"{loss['loss']:g} nats"
        events.note(
            f"limit {limit}: {search.evaluations} plans measured; the smallest that fits loses at most "
            f"{search.loss:.4g} nats per token, one standard error included, on each half of "
            f"{planner.halves[0].text.label}"
        )
        return planner.sized(replace(search.plan, limits=loss))
    max_bytes = limits.bytes
    speed = None
    if target is not None and budgets.by_speed:
        speed = planning.speed_model(planner.run, table, target)
    solutions: list[planning.BudgetSolution] = []

    def make(fixed_bytes: int) -> Plan:
        problem = _problem(
            planner,
            table,
            choosing,
            metric=choosing.metric or KL,
            speed=speed,
            fixed_bytes=fixed_bytes,
        )
        solution = planning.plan_for_budget(
            problem,
            max_bytes=max_bytes,
            max_kl=limits.max_loss,
            name=choosing.name,
            **asdict(budgets),
        )
        solutions.append(solution)
        return solution.plan

    # The solver adds up upper bounds; a stock recipe's file is measured to the byte and may fit where the bounds do
    # not. With other limits or another goal only the solver knows what is best.
    rivals: list[Plan] = []
    if (
        target is not None
        and limits.max_bytes is not None
        and limits.max_loss is None
        and budgets in (Budgets(), Budgets(minimise="kl"))
    ):
        problem = _problem(
            planner, table, choosing, metric=choosing.metric or KL, keep_fused=False
        )
        rivals = [planner.corrected(plan) for plan in planner.improved_stock(problem)]
    plan = planner.fitted(make, max_bytes, rivals)
    solution = next(
        (
            solution
            for solution in solutions
            if solution.plan.assignment == plan.assignment
        ),
        solutions[-1],
    )
    proof = (
        "proven optimal"
        if solution.gap == 0
        else f"within {solution.gap:.2e} of the optimum"
    )
    events.note(
        f"least {solution.minimised} within the budget: {proof}, in {solution.seconds:.2f} s"
    )
    if plan.made_by == OUR_STOCK:
        events.note(f"{OUR_STOCK} fits and is predicted to lose less; it is used instead")
    if planner.held is not None:
        plan = replace(plan, limits={**limits.given})
        events.note(_held(planner, plan))
    if speed is None:
        return plan
    events.note(f"about {human_speed(solution.totals.seconds)}, predicted {speed.basis}")
    notes: dict[str, Any] = {"speed": speed.basis}
    if speed.options:  # the speed is that of files that were written so
        notes[EXPORT_OPTIONS] = dict(speed.options)
        spelled = ", ".join(f"{name} {value}" for name, value in speed.options.items())
        events.note(
            f"its file will have the timed files' {spelled}: predicted losses leave that out, kl-lens evaluate shows it"
        )
    return replace(plan, notes=plan.notes | notes)


def _held(planner: TargetPlanner, plan: Plan) -> str:
    """Where the memory goes."""
    besides = planner.held
    assert besides is not None
    caches = plan.held_bytes - besides.fixed
    formats = ", ".join(f"{kind} in {name}" for kind, name in plan.caches.items())
    unmeasured = any(len(group.choices) == 1 for group in besides.caches)
    more = "; kl-lens measure --states measures others" if unmeasured else ""
    return (
        f"memory {human_bytes(plan.memory_bytes)}: file {human_bytes(plan.file_bytes or 0)}, states "
        f"{human_bytes(besides.states)}, caches {human_bytes(caches)}{f' ({formats}{more})' if formats else ''}, the "
        f"runtime itself {human_bytes(besides.runtime)}"
    )


def _problem(
    planner: TargetPlanner, table: SensitivityTable, choosing: Choosing, **options: Any
) -> planning.Problem:
    target = planner.target
    recipes = choosing.formats or None
    interaction = planner.run.interaction(None if target is None else target.name)
    return planning.build_problem(
        table,
        held=planner.held,
        target=target,
        recipes=recipes,
        no_head=choosing.no_head,
        **{"interaction": interaction} | options,
    )


def _require_storable(
    planner: TargetPlanner, table: SensitivityTable, choosing: Choosing
) -> None:
    """Otherwise the only plan would be FP16."""
    target = planner.target
    chosen = choosing.formats or table.formats
    if target is None or set(chosen) == {FP16}:
        return
    grids = [get_format(name.partition("+")[0]) for name in chosen if name != FP16]
    if not any(
        target.holds(grid, c.shape) is None for grid in grids for c in table.candidates
    ):
        raise PlanError(
            f"{target.title} can store none of the measured formats ({', '.join(chosen)}); repeat kl-lens "
            f"measure with --target {target.name} instead of --formats"
        )


# -- tuning --------------------------------------------------------------------------------------------------


def with_tuning(plan: Plan, windows: int, planner: TargetPlanner) -> Plan:
    """The plan with scales tuned on text, or the plan itself if its KL on the first held-out half did not fall; the
    second half confirms, as for every plan."""
    run = planner.run
    model = planner.model
    meter = planner.halves[0]
    events = planner.session.events
    recipes = {
        name: recipe for name, recipe in parsed(plan.assignment).items() if recipe != FP16
    }
    model.weights.learnt_by(recipes.values(), plan.statistics)
    drawn, text = _tuning_text(planner, windows)
    rates = TuningRates()
    weights = (model.fingerprint, model.weights.digests(recipes), text.fingerprint)
    facts = [TUNING_VERSION, *weights, asdict(rates)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=4).hexdigest()
    spelled = {
        name: Recipe(recipe.grid.name, f"{TUNED}-{digest}")
        for name, recipe in recipes.items()
        if scales_of(recipe.grid, model.weights.quantized(name, recipe))
    }
    if not all(model.weights.has_tuned(name, recipe) for name, recipe in spelled.items()):
        about = drawn.provenance()
        identity = {
            name: about[name] for name in ("source", "split", "windows", "length", "seed")
        }
        run.store(TUNING, digest, identity)  # no plan of this run is judged on it
        events.note(
            f"tuning {plan.name} on {text.label}, {len(text)} windows of {text.length}"
        )
        with going_on(run.folder), events.progress(f"tuning {plan.name}") as shown:

            def advance(step: int, steps: int) -> None:
                if step == 1:
                    shown.started(steps, 0)
                shown.advanced(1, f"step {step}")

            for name, quantized in tuned(
                model, recipes, text.ids, rates, advance
            ).items():
                model.weights.keep_tuned(name, spelled[name], quantized)
    assignment = plan.assignment | spelled
    before = meter.measure(plan.assignment)
    after = meter.measure(assignment)
    change = f"KL {before.kl.value:.4g} before and {after.kl.value:.4g} after, on {meter.text.label}"
    if paired_difference(after.windows, before.windows).value >= 0:
        events.note(
            f"{plan.name}: tuning did not help ({change}); the plan stays as it was"
        )
        return plan
    events.note(f"{plan.name}: tuned, {change}")
    return replace(
        plan,
        assignment=assignment,
        made_by=f"{plan.made_by}, tuned",
        predicted_kl=None,
        measured=None,
        statistics=None,
        notes=plan.notes | {"tuned": change},
    )


def _tuning_text(planner: TargetPlanner, windows: int) -> tuple[Windows, Windows]:
    """Windows of the run's calibration text at random places; and those of them that share nothing with the windows
    that measured or taught methods."""
    session = planner.session
    run = planner.run
    task = planner.model.task
    measured = session.calibration(run, task)
    learnt = StoredStatistics.held_by(run.folder)
    assert measured.seed is not None
    drawn = session.drawn(
        measured.label,
        task,
        length=measured.length,
        seed=measured.seed + 2,
        windows=min(windows, measured.stream_tokens // measured.length),
    )
    for half in planner.halves:
        refuse_overlap(drawn, half.text)
    used = [
        measured,
        *([session.drawn_again(learnt.identity["text"], task)] if learnt else []),
    ]
    used_starts = [
        start for text in used if text.label == drawn.label for start in text.starts
    ]
    apart = [
        i
        for i, start in enumerate(drawn.starts)
        if all(abs(start - t) >= drawn.length for t in used_starts)
    ]
    if not apart:
        raise TextError(
            f"{drawn.label}: measuring used all of it; --tune needs more text"
        )
    starts = tuple(drawn.starts[i] for i in apart)
    documents = tuple(drawn.documents[i] for i in apart)
    return drawn, replace(drawn, ids=drawn.ids[apart], starts=starts, documents=documents)
