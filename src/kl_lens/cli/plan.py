"""`kl-lens plan`: plans side by side, or the best plan of every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kl_lens import planning
from kl_lens.base.units import human_bytes, human_kl
from kl_lens.cli.console import console, new_table
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.study.plan import PlanResult

SHOWN_POINTS = 25


def as_json(result: PlanResult) -> Any:
    if result.frontier is not None:
        return [{"bytes": point.bytes, "predicted_kl": point.kl} for point in result.frontier]
    plans = [plan.to_json() for plan in result.plans]
    if result.handovers:
        recipes = [
            {"files": [str(path) for path in each.files], "use": each.use} for each in result.handovers
        ]
        return {"plans": plans, "recipes": recipes}
    if result.differences is None:
        return plans
    return {"plans": plans, "differences": {d.component: d.recipes for d in result.differences}}


def show(result: PlanResult) -> None:
    if result.frontier is not None:
        _show_frontier(result.table, result.frontier)
        return
    _show_plans(result.plans, result.table)
    if result.differences is not None:
        _show_differences(result.plans, result.differences)
        return
    count = len(result.plans)
    where = f"written to {result.written_to}" if result.written_to else "nothing was written (--dry-run)"
    console().print(f"{count} plan{'s' if count != 1 else ''}, {where}.")
    for handover in result.handovers:
        console().print(
            f"Written: {', '.join(map(str, handover.files))}. Use:\n{handover.use}", soft_wrap=True
        )


def _number(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _show_plans(plans: Sequence[Plan], table: SensitivityTable) -> None:
    numbers = ("size", "bits/weight", "predicted KL", "measured KL", "perplexity")
    shares = ("components per format (share of the weights)",)
    view = new_table(f"Plans for {table.model}", ("plan",), numbers, shares)
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
    console().print(view)


def _show_differences(plans: Sequence[Plan], differences: Sequence[planning.Difference]) -> None:
    view = new_table("Where they differ", ("component", *(plan.name for plan in plans)))
    for difference in differences:
        view.add_row(difference.component, *difference.recipes)
    console().print(view if differences else "The plans are the same.")


def _show_frontier(table: SensitivityTable, frontier: planning.Frontier) -> None:
    title = f"Pareto frontier of {table.model}: {len(frontier):,} plans"
    view = new_table(title, right=("size", "predicted KL"))
    for point in frontier.thinned(SHOWN_POINTS):
        view.add_row(human_bytes(point.bytes), human_kl(point.kl))
    merged = f"Approximate: each plan is within ×{frontier.within:.3f} of the optimum."
    out = console()
    out.print(view)
    out.print("Complete." if frontier.complete else merged)
    out.print(f"{SHOWN_POINTS} of them shown; --json gives all. For any size between: --max-bytes SIZE.")
