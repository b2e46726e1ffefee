"""`kl-lens plan --run DIR`: which component gets which format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from kl_lens import paper, planning
from kl_lens.cli import options
from kl_lens.errors import PlanError
from kl_lens.records import Measured, Plan, SensitivityTable
from kl_lens.runs import Run
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.units import human_bytes, human_kl, parse_bytes, parse_seconds, parse_share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_model(parser)
    points = parser.add_argument_group("the paper's points")
    points.add_argument("--paper", action="store_true", help="uniform INT8 and INT4, and points 01 to 10")
    pipeline = points.add_mutually_exclusive_group()
    pipeline.add_argument("--gpu", action="store_true", help="the GPU pipeline: INT8 or FP16")
    pipeline.add_argument("--gpu-int4", action="store_true", help="the GPU pipeline with INT4")
    points.add_argument(
        "--metric",
        choices=tuple(paper.RANKING_METRICS),
        default=None,
        help=f"what ranks the components (default: {paper.PUBLISHED_METRIC} for the paper's points, "
        "kl_teacher_to_student elsewhere)",
    )
    parser.add_argument(
        "--no-head", action="store_true", help="leave the head at FP16, as the published models do"
    )
    parser.add_argument(
        "--uniform",
        metavar="FORMATS",
        help="one plan per format, all components alike; for example fp16,int8",
    )
    greedy = parser.add_argument_group("greedy under a quality budget")
    greedy.add_argument(
        "--gamma", type=float, metavar="G", help="quantize while held-out perplexity ≤ G × the original's"
    )
    greedy.add_argument(
        "--gamma-exhaustive",
        type=float,
        metavar="G",
        help="the same, one by one, as the paper's algorithm does",
    )
    budget = parser.add_argument_group("exact budgets (any two together; one is minimised under the other)")
    budget.add_argument("--max-bytes", metavar="SIZE", help="for example 90MB")
    budget.add_argument("--max-bpw", type=float, metavar="BITS", help="bits per weight, over all weights")
    budget.add_argument("--max-kl", type=float, metavar="NATS", help="predicted KL per token")
    budget.add_argument(
        "--max-drop",
        metavar="SHARE",
        help="for example 3%%: the smallest plan whose held-out perplexity rises by no more, by measuring a few",
    )
    budget.add_argument(
        "--max-latency", metavar="TIME", help="for example 12ms; needs a profile of the target"
    )
    budget.add_argument("--profile", metavar="NAME", help="which latency profile of the run to use")
    budget.add_argument("--minimise", choices=("bytes", "kl", "latency"), help="default: what has no limit")
    budget.add_argument("--formats", help="comma-separated; default: all measured ones")
    budget.add_argument(
        "--frontier", action="store_true", help="print the whole Pareto frontier of bytes and KL"
    )
    proof = parser.add_argument_group("verify and refine, on held-out text")
    proof.add_argument("--verify", action="store_true", help="measure the plan as a whole")
    proof.add_argument("--refine", action="store_true", help="improve the plan by measured swaps")
    proof.add_argument(
        "--max-evaluations", type=options.positive, default=60, metavar="N", help="default: 60"
    )
    options.add_held_out(proof, windows=32)
    parser.add_argument("--plan", metavar="NAME", help="verify or refine this plan of the run")
    parser.add_argument("--compare", nargs="+", metavar="NAME", help="plans side by side")
    parser.add_argument("--name", help="name of the new plan")
    parser.add_argument("--dry-run", action="store_true", help="print without writing")
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    with options.open_run(arguments) as run:
        table = run.table()
        folder = run.folder / "plans"
        if arguments.compare:
            return _compare(arguments, table, folder)
        if arguments.frontier:
            return _frontier(arguments, table)
        meter = _Meters(arguments, run)
        plans = _make(arguments, run, table, folder, meter)
        if arguments.refine:
            plans = [_refined(arguments, plan, table, meter) for plan in plans]
        if arguments.verify or arguments.refine:
            plans = [_verified(plan, table, meter) for plan in plans]
        if not arguments.dry_run:
            run.note_command(sys.argv)
            for plan in plans:
                planning.write_plan(plan, planning.plan_path(folder, plan.name), table.components)
    if arguments.json:
        options.print_json([plan.to_json() for plan in plans])
    else:
        _print_plans(plans, table)
        where = "nothing was written (--dry-run)" if arguments.dry_run else f"written to {folder}"
        options.console().print(f"{len(plans)} plan{'s' if len(plans) != 1 else ''}, {where}.")
    return 0


class _Meters:
    """The model on held-out text, loaded only when something has to be measured: one half decides, one confirms."""

    def __init__(self, arguments: argparse.Namespace, run: Run) -> None:
        self._arguments, self._run = arguments, run
        self._all: PlanMeter | None = None

    def _windows(self) -> tuple[PlanMeter, PlanMeter]:
        model = options.load_run_model(self._arguments, self._run)
        held_out = options.held_out_windows(self._arguments, self._run, model.require_tokenizer())
        self.source = options.text_name(held_out)
        middle = (len(held_out) + 1) // 2
        if middle == len(held_out):
            raise PlanError("--held-out-windows must be at least 2: one half decides, the other confirms")
        return PlanMeter(model, held_out.first(middle)), PlanMeter(model, options.rest(held_out, middle))

    @property
    def deciding(self) -> PlanMeter:
        if self._all is None:
            self._all, self._confirming = self._windows()
        return self._all

    @property
    def confirming(self) -> PlanMeter:
        _ = self.deciding
        return self._confirming


def _make(
    arguments: argparse.Namespace, run: Run, table: SensitivityTable, folder: Path, meter: _Meters
) -> list[Plan]:
    if arguments.plan:
        plan = planning.read_plan(planning.plan_path(folder, arguments.plan), table.components)
        return [planning.repredicted(plan, table) if plan.notes.get("edited") else plan]
    made: list[Plan] = []
    if arguments.paper or arguments.gpu or arguments.gpu_int4:
        pipeline = "gpu" if arguments.gpu else "gpu-int4" if arguments.gpu_int4 else "cpu"
        made += paper.paper_points(
            table,
            metric=arguments.metric or paper.PUBLISHED_METRIC,
            pipeline=pipeline,
            no_head=arguments.no_head,
        )
    for name in _formats_of(arguments.uniform):
        made.append(planning.uniform_plan(table, name, no_head=arguments.no_head))
    gamma = arguments.gamma or arguments.gamma_exhaustive
    if gamma is not None:
        result = paper.greedy_plan(
            table,
            meter.deciding.perplexity,
            gamma=gamma,
            exhaustive=arguments.gamma_exhaustive is not None,
            metric=_metric(arguments, table),
            no_head=arguments.no_head,
            name=arguments.name,
        )
        print(
            f"greedy: {result.evaluations} evaluations of perplexity; the original's is {result.baseline:.3f}, "
            f"the plan's {result.perplexity:.3f}",
            file=sys.stderr,
        )
        made.append(result.plan)
    if arguments.max_drop is not None:
        made.append(_within_drop(arguments, run, table, meter))
    elif any(
        v is not None
        for v in (arguments.max_bytes, arguments.max_bpw, arguments.max_kl, arguments.max_latency)
    ):
        made.append(_budget(arguments, run, table))
    if not made:
        raise PlanError(
            "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-drop, "
            "--max-latency or --frontier; "
            "or name a plan with --plan to --verify or --refine it"
        )
    for plan in made:
        for name in plan.notes.get("not_in_the_lists", []):
            print(f"kl-lens plan: {name} was never measured and stays FP16", file=sys.stderr)
    return made


def _within_drop(arguments: argparse.Namespace, run: Run, table: SensitivityTable, meter: _Meters) -> Plan:
    others = (arguments.max_bytes, arguments.max_bpw, arguments.max_kl, arguments.max_latency)
    if any(value is not None for value in others):
        raise PlanError("--max-drop sets the KL limit itself; use it without --max-bytes, --max-bpw, --max-kl, "
                        "--max-latency")  # fmt: skip

    def perplexity(assignment: Mapping[str, str]) -> float:
        perplexity = meter.deciding.measure(assignment).perplexity
        # One standard error of the change on top: a little text must not talk us into too small a plan.
        return perplexity.value + (perplexity.standard_error if assignment else 0.0)

    result = planning.plan_for_drop(
        table,
        perplexity,
        max_drop=parse_share(arguments.max_drop, "--max-drop"),
        recipes=_formats(arguments),
        no_head=arguments.no_head,
        name=arguments.name,
    )
    print(
        f"within {arguments.max_drop}: {result.evaluations} plans measured; perplexity with its error "
        f"{result.perplexity:.3f}, against "
        f"the original's {result.original:.3f}",
        file=sys.stderr,
    )
    return result.plan


def _budget(arguments: argparse.Namespace, run: Run, table: SensitivityTable) -> Plan:
    latency = None
    if arguments.max_latency or arguments.minimise == "latency" or arguments.profile:
        latency = _latency(arguments.profile, run)
    solution = planning.plan_for_budget(
        table,
        max_bytes=parse_bytes(arguments.max_bytes) if arguments.max_bytes else None,
        max_bpw=arguments.max_bpw,
        max_kl=arguments.max_kl,
        max_latency=parse_seconds(arguments.max_latency) if arguments.max_latency else None,
        latency=latency,
        minimise=arguments.minimise,
        recipes=_formats(arguments),
        no_head=arguments.no_head,
        metric=_metric(arguments, table),
        name=arguments.name,
    )
    proof = "proven optimal" if solution.gap == 0 else f"within {solution.gap:.2e} of the optimum"
    print(f"exact budget: least {solution.minimised}, {proof}, in {solution.seconds:.2f} s", file=sys.stderr)
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


def _metric(arguments: argparse.Namespace, table: SensitivityTable) -> str:
    """What was asked for, or what predicts damage in these measurements; said where that is not the usual one."""
    metric, why = planning.prediction_metric(table)
    if arguments.metric is None and why is not None:
        print(f"kl-lens plan: {why}", file=sys.stderr)
    return arguments.metric or metric


def _formats(arguments: argparse.Namespace) -> list[str] | None:
    return _formats_of(arguments.formats) or None


def _formats_of(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _refined(arguments: argparse.Namespace, plan: Plan, table: SensitivityTable, meter: _Meters) -> Plan:
    problem = planning.build_problem(
        table,
        recipes=_formats(arguments),
        exclude={table.head} if arguments.no_head else (),
        fixed_bytes=plan.fixed_bytes,
    )
    result = planning.refine(
        problem,
        plan.assignment,
        meter.deciding.kl_by_window,
        max_bytes=plan.limits.get("bytes"),
        max_evaluations=arguments.max_evaluations,
        confirm=meter.confirming.kl_by_window,
    )
    accepted = sum(trial.accepted for trial in result.history)
    how = "no swap is left to try" if result.exhausted else "stopped at --max-evaluations"
    message = f"{plan.name}: {accepted} of {len(result.history)} swaps accepted ({how}); KL "
    message += f"{result.kl_before:.4e} → {result.kl_after:.4e}"
    if result.reverted:
        message += "; the confirming half did not agree, so the plan stays as it was"
    print(message, file=sys.stderr)
    return planning.refined_plan(table, plan, result, arguments.name or f"{plan.name}_refined")


def _verified(plan: Plan, table: SensitivityTable, meter: _Meters) -> Plan:
    """The confirming half decides nothing, so it is the one to report from."""
    result = meter.confirming.measure(plan.assignment)
    predicted = planning.Predictor(table).total(plan.assignment)
    measured = Measured(
        result.kl, result.perplexity, result.original_perplexity, meter.source, len(result.windows)
    )
    notes = dict(plan.notes)
    if predicted is not None:
        verification = planning.verify(predicted, result.kl)
        notes["verification"] = verification.message
        if verification.explained is False:
            print(f"kl-lens plan: {plan.name}: {verification.message}", file=sys.stderr)
    return replace(plan, measured=measured, notes=notes)


def _number(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _print_plans(plans: Sequence[Plan], table: SensitivityTable) -> None:
    view = Table(title=f"Plans for {table.model}", title_justify="left")
    view.add_column("plan")
    for column in ("size", "bits/weight", "predicted KL", "measured KL", "perplexity"):
        view.add_column(column, justify="right")
    view.add_column("components per format (share of the weights)", overflow="fold")
    for plan in plans:
        row = planning.plan_row(plan, table.components)
        view.add_row(
            row.name,
            human_bytes(row.bytes),
            f"{row.bits_per_weight:.3f}",
            _number(row.predicted_kl, ".4e"),
            _number(row.measured_kl, ".4e"),
            _number(row.perplexity, ".3f"),
            row.shares_text,
        )
    options.console().print(view)


def _compare(arguments: argparse.Namespace, table: SensitivityTable, folder: Path) -> int:
    plans = [
        planning.read_plan(planning.plan_path(folder, name), table.components) for name in arguments.compare
    ]
    comparison = planning.compare(plans, table.components)
    if arguments.json:
        options.print_json(
            {
                "plans": [plan.to_json() for plan in plans],
                "differences": {d.component: d.formats for d in comparison.differences},
            }
        )
        return 0
    _print_plans(plans, table)
    view = Table(title="Where they differ", title_justify="left")
    view.add_column("component")
    for plan in plans:
        view.add_column(plan.name)
    for difference in comparison.differences:
        view.add_row(difference.component, *difference.formats)
    options.console().print(view if comparison.differences else "They are the same.")
    return 0


def _frontier(arguments: argparse.Namespace, table: SensitivityTable) -> int:
    problem = planning.build_problem(
        table,
        recipes=_formats(arguments),
        exclude={table.head} if arguments.no_head else (),
        metric=_metric(arguments, table),
    )
    frontier = planning.pareto_frontier(problem)
    if arguments.json:
        options.print_json([{"bytes": point.bytes, "predicted_kl": point.kl} for point in frontier])
        return 0
    view = Table(title=f"Pareto frontier of {table.model}: {len(frontier):,} plans", title_justify="left")
    for column in ("size", "predicted KL"):
        view.add_column(column, justify="right")
    for point in frontier.thinned(25):
        view.add_row(human_bytes(point.bytes), human_kl(point.kl))
    console = options.console()
    console.print(view)
    console.print(
        "Complete."
        if frontier.complete
        else f"Merged: each plan is within ×{frontier.within:.3f} of the optimum."
    )
    console.print("25 of them shown; --json gives all. Any budget between is one command: --max-bytes SIZE.")
    return 0
