"""`kl-lens plan`: plans side by side, or the best plan of every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kl_lens import planning
from kl_lens.base.units import human_bytes, human_kl
from kl_lens.cli.console import console, table
from kl_lens.study.plan import PlanResult

SHOWN_POINTS = 25


def as_json(result: PlanResult) -> Any:
    if result.frontier is not None:
        return [{"bytes": point.bytes, "predicted_kl": point.kl} for point in result.frontier]
    if result.handovers:
        recipes = [{"files": each.files, "use": each.use} for each in result.handovers]
        return {"plans": result.plans, "recipes": recipes}
    if result.differences is None:
        return result.plans
    return {"plans": result.plans, "differences": result.differences}


def show(result: PlanResult) -> None:
    out = console()
    if result.frontier is not None:
        _show_frontier(result.table.model, result.frontier)
        return
    rows = []
    for plan in result.plans:
        cost, measured = planning.cost_of(result.table.components, plan.assignment), plan.measured
        rows.append(
            {
                "plan": plan.name,
                "size": human_bytes(cost.bytes),
                "bits/weight": f"{cost.bits_per_weight:.3f}",
                "predicted KL": _number(plan.predicted_kl, ".4e"),
                "measured KL": _number(measured.kl.value if measured else None, ".4e"),
                "perplexity": _number(measured.perplexity.value if measured else None, ".3f"),
                "components per format (share of the weights)": cost.shares_text,
            }
        )
    out.print(table(f"Plans for {result.table.model}", rows))
    if result.differences is not None:
        names = [plan.name for plan in result.plans]
        rows = [
            {"component": component} | dict(zip(names, recipes, strict=False))
            for component, recipes in result.differences.items()
        ]
        out.print(table("Where they differ", rows) if rows else "The plans are the same.")
        return
    count = len(result.plans)
    out.print(f"{count} plan{'s' if count != 1 else ''}, written to {result.written_to}.")
    for handover in result.handovers:
        out.print(f"Written: {', '.join(map(str, handover.files))}. Use:\n{handover.use}", soft_wrap=True)


def _number(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _show_frontier(model: str, frontier: Sequence[planning.FrontierPoint]) -> None:
    last = len(frontier) - 1
    places = sorted({round(i * last / (SHOWN_POINTS - 1)) for i in range(SHOWN_POINTS)})
    shown = [frontier[place] for place in places]
    rows = [{"size": human_bytes(point.bytes), "predicted KL": human_kl(point.kl)} for point in shown]
    out = console()
    out.print(table(f"Pareto frontier of {model}: {len(frontier):,} plans", rows))
    out.print(f"{len(rows)} of them shown; --json gives all. For any size between: --max-bytes SIZE.")
