"""`plan`: which component gets which format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.errors import PlanError
from kl_lens.paper import PUBLISHED_METRIC, RANKING_METRICS, greedy_plan, paper_points
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import (
    COUNT,
    NAMES,
    SHARE,
    SIZE,
    TIME,
    HeldOut,
    Loading,
    OfRun,
    command_of,
    grouped,
    option,
)
from kl_lens.pipeline.workbench import Workbench
from kl_lens.records import Measured, Plan, SensitivityTable
from kl_lens.runs import Run
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.units import spell_share

_paper = grouped("the paper's points")
_quality = grouped("greedy under a quality budget")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("verify and refine, on held-out text")
KL = "kl_teacher_to_student"


@dataclass(frozen=True, kw_only=True)
class PlanSettings(HeldOut, Loading, OfRun):
    verb: ClassVar[str] = "plan"

    paper: bool = _paper(False, "uniform INT8 and INT4, and points 01 to 10")
    gpu: bool = _paper(False, "the GPU pipeline: INT8 or FP16", excludes="pipeline")
    gpu_int4: bool = _paper(False, "the GPU pipeline with INT4", excludes="pipeline")
    metric: str | None = _paper(
        None,
        f"what ranks the components (default: {PUBLISHED_METRIC} for the paper's points, {KL} elsewhere)",
        choices=tuple(RANKING_METRICS),
    )
    no_head: bool = option(False, "leave the head at FP16, as the published models do")
    uniform: tuple[str, ...] = option(
        (), "one plan per format, all components alike; for example fp16,int8", kind=NAMES, metavar="FORMATS"
    )
    gamma: float | None = _quality(
        None, "quantize while held-out perplexity ≤ G × the original's", metavar="G"
    )
    gamma_exhaustive: float | None = _quality(
        None, "the same, one by one, as the paper's algorithm does", metavar="G"
    )
    max_bytes: int | None = _budget(None, "for example 90MB", kind=SIZE)
    max_bpw: float | None = _budget(None, "bits per weight, over all weights", metavar="BITS")
    max_kl: float | None = _budget(None, "predicted KL per token", metavar="NATS")
    max_drop: float | None = _budget(
        None,
        "for example 3%: the smallest plan whose held-out perplexity rises by no more, by measuring a few",
        kind=SHARE,
    )
    max_latency: float | None = _budget(None, "for example 12ms; needs a profile of the target", kind=TIME)
    profile: str | None = _budget(None, "which latency profile of the run to use", metavar="NAME")
    minimise: str | None = _budget(None, "default: what has no limit", choices=("bytes", "kl", "latency"))
    formats: tuple[str, ...] = _budget((), "comma-separated; default: all measured ones", kind=NAMES)
    frontier: bool = _budget(False, "print the whole Pareto frontier of bytes and KL")
    verify: bool = _proof(False, "measure the plan as a whole")
    refine: bool = _proof(False, "improve the plan by measured swaps")
    max_evaluations: int = _proof(60, kind=COUNT)
    held_out: str = _proof("wikitext2:valid", metavar="TEXT")
    held_out_windows: int = _proof(32, kind=COUNT)
    plan: str | None = option(None, "verify or refine this plan of the run", metavar="NAME")
    compare: tuple[str, ...] = option((), "plans side by side", nargs="+", metavar="NAME")
    name: str | None = option(None, "name of the new plan")
    dry_run: bool = option(False, "print without writing")

    @property
    def budgets(self) -> dict[str, Any]:
        names = ("max_bytes", "max_bpw", "max_kl", "max_latency")
        return {name: getattr(self, name) for name in names}

    @property
    def choice(self) -> dict[str, Any]:
        """What may be chosen from: arguments of every planner."""
        return {"recipes": self.formats or None, "no_head": self.no_head}

    def menu(self, table: SensitivityTable) -> dict[str, Any]:
        """The same, as arguments of `build_problem`."""
        return {"recipes": self.formats or None, "exclude": {table.head} if self.no_head else ()}


@dataclass(frozen=True)
class PlanResult:
    """Plans that were made or compared; or, alone, a frontier."""

    table: SensitivityTable
    plans: list[Plan] = field(default_factory=list)
    written_to: Path | None = None
    differences: Sequence[planning.Difference] | None = None  # of --compare
    frontier: planning.Frontier | None = None


def plan(settings: PlanSettings, bench: Workbench, events: Events) -> PlanResult:
    with Run.open(settings.run_folder) as run:
        table = run.table()
        folder = run.folder / "plans"
        if settings.compare:
            plans = [_read(folder, name, table) for name in settings.compare]
            return PlanResult(table, plans, differences=planning.compare(plans, table.components).differences)
        if settings.frontier:
            problem = planning.build_problem(
                table, **settings.menu(table), metric=_metric(settings, table, events)
            )
            return PlanResult(table, frontier=planning.pareto_frontier(problem))
        meters = _Meters(settings, run, bench)
        plans = _made(settings, run, table, meters, events)
        if settings.refine:
            options = settings.menu(table) | {"max_evaluations": settings.max_evaluations}
            plans = [
                refined(each, table, *meters.halves, name=settings.name, events=events, **options)
                for each in plans
            ]
        if settings.verify or settings.refine:
            # The confirming half decides nothing, so it is the one to report from.
            plans = [verified(each, table, meters.halves[1], events) for each in plans]
        if settings.dry_run:
            return PlanResult(table, plans)
        run.note_command(["kl-lens", *command_of(settings)])
        for each in plans:
            planning.write_plan(each, planning.plan_path(folder, each.name), table.components)
        return PlanResult(table, plans, folder)


class _Meters:
    """The model on held-out text, opened only when something has to be measured: one half decides, one confirms."""

    def __init__(self, settings: PlanSettings, run: Run, bench: Workbench) -> None:
        self._settings, self._run, self._bench = settings, run, bench

    @property
    def halves(self) -> tuple[PlanMeter, PlanMeter]:
        model = self._bench.model_of(self._run, self._settings)
        held_out = self._bench.held_out(self._settings, self._run, model.require_tokenizer())
        middle = (len(held_out) + 1) // 2
        if middle == len(held_out):
            raise PlanError("--held-out-windows must be at least 2: one half decides, the other confirms")
        return self._bench.meter(model, held_out.first(middle)), self._bench.meter(
            model, held_out.after(middle)
        )


def _read(folder: Path, name: str, table: SensitivityTable) -> Plan:
    return planning.read_plan(planning.plan_path(folder, name), table.components)


def _made(
    settings: PlanSettings, run: Run, table: SensitivityTable, meters: _Meters, events: Events
) -> list[Plan]:
    if settings.plan:
        plan = _read(run.folder / "plans", settings.plan, table)
        return [planning.repredicted(plan, table) if plan.notes.get("edited") else plan]
    made: list[Plan] = []
    if settings.paper or settings.gpu or settings.gpu_int4:
        made += paper_points(
            table,
            metric=settings.metric or PUBLISHED_METRIC,
            pipeline="gpu" if settings.gpu else "gpu-int4" if settings.gpu_int4 else "cpu",
            no_head=settings.no_head,
        )
    for name in settings.uniform:
        made.append(planning.uniform_plan(table, name, no_head=settings.no_head))
    if settings.gamma is not None or settings.gamma_exhaustive is not None:
        made.append(_greedy(settings, table, meters, events))
    if settings.max_drop is not None:
        made.append(_within_drop(settings, table, meters, events))
    elif any(value is not None for value in settings.budgets.values()):
        made.append(_within_budget(settings, run, table, events))
    if not made:
        raise PlanError(
            "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-drop, "
            "--max-latency or --frontier; or name a plan with --plan to --verify or --refine it"
        )
    for each in made:
        for name in each.notes.get("not_in_the_lists", []):
            events.warn(f"{name} was never measured and stays FP16")
    return made


def _greedy(settings: PlanSettings, table: SensitivityTable, meters: _Meters, events: Events) -> Plan:
    gamma = settings.gamma or settings.gamma_exhaustive
    assert gamma is not None
    result = greedy_plan(
        table,
        meters.halves[0].perplexity,
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


def _within_drop(settings: PlanSettings, table: SensitivityTable, meters: _Meters, events: Events) -> Plan:
    if any(value is not None for value in settings.budgets.values()):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in settings.budgets)
        raise PlanError(f"--max-drop sets the KL limit itself; use it without {flags}")
    assert settings.max_drop is not None
    meter = meters.halves[0]

    def perplexity(assignment: Mapping[str, str]) -> float:
        found = meter.measure(assignment).perplexity
        # One standard error of the change on top: a little text must not talk us into too small a plan.
        return found.value + (found.standard_error if assignment else 0.0)

    result = planning.plan_for_drop(
        table, perplexity, max_drop=settings.max_drop, name=settings.name, **settings.choice
    )
    events.note(
        f"within {spell_share(settings.max_drop)}: {result.evaluations} plans measured; perplexity with its error "
        f"{result.perplexity:.3f}, against the original's {result.original:.3f}"
    )
    return result.plan


def _within_budget(settings: PlanSettings, run: Run, table: SensitivityTable, events: Events) -> Plan:
    timed = settings.max_latency or settings.minimise == "latency" or settings.profile
    solution = planning.plan_for_budget(
        table,
        latency=_latency(settings.profile, run) if timed else None,
        minimise=settings.minimise,
        metric=_metric(settings, table, events),
        name=settings.name,
        **settings.budgets,
        **settings.choice,
    )
    proof = "proven optimal" if solution.gap == 0 else f"within {solution.gap:.2e} of the optimum"
    events.note(f"exact budget: least {solution.minimised}, {proof}, in {solution.seconds:.2f} s")
    return solution.plan


def _latency(name: str | None, run: Run) -> dict[tuple[str, str], float]:
    """A profile is stored as {component: {format: seconds}}."""
    profiles = run.load_all("latency")
    if not profiles:
        raise PlanError(f"{run.folder} holds no latency profile; make one with: kl-lens benchmark --layers")
    if name is not None and name not in profiles:
        raise PlanError(f"no latency profile {name!r}; the run has {', '.join(profiles)}")
    profile = profiles[name] if name else list(profiles.values())[-1]
    return {(component, fmt): float(s) for component, row in profile.items() for fmt, s in row.items()}


def _metric(settings: PlanSettings, table: SensitivityTable, events: Events) -> str:
    """What was asked for, or what predicts damage in these measurements; said where that is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if settings.metric is None and why is not None:
        events.warn(why)
    return settings.metric or metric


def refined(
    plan: Plan,
    table: SensitivityTable,
    deciding: PlanMeter,
    confirming: PlanMeter,
    *,
    max_evaluations: int,
    name: str | None = None,
    events: Events | None = None,
    **menu: Any,
) -> Plan:
    """The plan improved by measured swaps, under a name of its own; `menu` as `build_problem` takes it."""
    result = planning.refine(
        planning.build_problem(table, fixed_bytes=plan.fixed_bytes, **menu),
        plan.assignment,
        deciding.kl_by_window,
        max_bytes=plan.limits.get("bytes"),
        max_evaluations=max_evaluations,
        confirm=confirming.kl_by_window,
    )
    accepted = sum(trial.accepted for trial in result.history)
    how = "no swap is left to try" if result.exhausted else "stopped at --max-evaluations"
    message = f"{plan.name}: {accepted} of {len(result.history)} swaps accepted ({how}); KL "
    message += f"{result.kl_before:.4e} → {result.kl_after:.4e}"
    if result.reverted:
        message += "; the confirming half did not agree, so the plan stays as it was"
    (events or Events()).note(message)
    return planning.refined_plan(table, plan, result, name or f"{plan.name}_refined")


def verified(plan: Plan, table: SensitivityTable, meter: PlanMeter, events: Events | None = None) -> Plan:
    """The plan with what it does as a whole on the meter's text."""
    learnt = meter.model.weights.learnt_by(plan.assignment.values(), plan.statistics)
    result = meter.measure(plan.assignment)
    measured = Measured(
        result.kl, result.perplexity, result.original_perplexity, meter.text.label, len(result.windows)
    )
    predicted = planning.Predictor(table).total(plan.assignment)
    notes = dict(plan.notes)
    if predicted is not None:
        verification = planning.verify(predicted, result.kl)
        notes["verification"] = verification.message
        if verification.explained is False:
            (events or Events()).warn(f"{plan.name}: {verification.message}")
    return replace(plan, measured=measured, notes=notes, statistics=learnt)
