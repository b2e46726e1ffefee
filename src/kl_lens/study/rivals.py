"""Plans beside the stock recipes of their target, measured in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kl_lens import planning
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.study.events import Events
from kl_lens.study.plan_settings import ALL, PlanSettings
from kl_lens.study.target_planner import TargetPlanner, verified
from kl_lens.weights.recipes import FP16, Recipe, parsed


def with_rivals(
    settings: PlanSettings,
    table: SensitivityTable,
    plans: Sequence[Plan],
    planner: TargetPlanner,
    events: Events,
) -> list[Plan]:
    """Measures the plans and the target's stock recipes in the same way; a stock recipe that wins replaces the plan."""
    rivals = rival_plans(planner, table, plans[-1] if plans else None, everything=settings.rivals == ALL)
    if not plans and not settings.verify:
        return rivals
    meter = planner.halves[1]
    factor = planner.interaction(table, plans) * planner.other_text(rivals)
    measured = [verified(each, table, meter, events, factor) for each in (*plans, *rivals)]
    if not plans:
        return measured
    ours, others = measured[len(plans) - 1], measured[len(plans) :]
    same = next((each for each in others if _stored(each) == _stored(ours)), None)
    contest = judged(planner, ours, [each for each in others if each is not same])
    sentence = contest.sentence(same.name if same else None)
    # One window decides nothing, whatever the rivals are: the user should ask for more.
    (events.fail if contest.unknown and contest.windows < 2 else events.note)(f"{ours.name}: {sentence}")
    if contest.winner == ours.name:
        notes = ours.notes | ({"taken_over": same.name} if same else {})
        kept = [replace(ours, contest=sentence, notes=notes)]
    else:
        winner = next(each for each in others if each.name == contest.winner)
        made_by = f"{winner.made_by}; replaces our own plan"
        notes = winner.notes | {"taken_over": winner.name}
        taken = replace(
            winner, name=ours.name, made_by=made_by, notes=notes, limits=ours.limits, contest=sentence
        )
        kept = [planner.sized(replace(ours, name=f"{ours.name}.own")), planner.sized(taken)]
    return [*measured[: len(plans) - 1], *others, *kept]


def _stored(plan: Plan) -> dict[str, Recipe]:
    return {name: recipe for name, recipe in parsed(plan.assignment).items() if recipe != FP16}


def rival_plans(
    planner: TargetPlanner, table: SensitivityTable, ours: Plan | None, *, everything: bool
) -> list[Plan]:
    """The target's stock recipes as plans: all, or the usual ones and the largest that is no larger than ours."""
    assert planner.target is not None
    stock = planner.target.stock_recipes(planner.model)
    made = {
        one.plan_name: planning.finished_plan(
            table, one.plan_name, dict(one.assignment), one.origin, family="stock"
        )
        for one in stock
    }
    if everything:
        return [planner.sized(plan) for plan in made.values()]
    usual = {one.plan_name: planner.sized(made[one.plan_name]) for one in stock if one.usual}
    size = (ours.file_bytes if ours else None) or 0
    # Reversed, so that of two equal sizes the one with an importance matrix comes first.
    below = [plan for plan in reversed(made.values()) if (plan.bytes or 0) + planner.fixed_bytes <= size]
    for plan in sorted(below, key=lambda plan: -(plan.bytes or 0)):
        nearest = planner.sized(plan)
        if (nearest.file_bytes or 0) <= size:
            usual[nearest.name] = nearest
            break
    return list(usual.values())


def judged(planner: TargetPlanner, ours: Plan, rivals: Sequence[Plan]) -> planning.Contest:
    """Our plan against its rivals on the second half of the text. All files are sized under our plan's name, because
    some files contain it."""
    meter = planner.halves[1]

    def contender(plan: Plan) -> planning.Contender:
        size = planner.sized(replace(plan, name=ours.name)).file_bytes or 0
        return planning.Contender(plan.name, size, meter.kl_by_window(plan.assignment))

    def keeps(rival: planning.Contender) -> bool:
        return planner.keeps(by_name[rival.name].assignment, ours.limits)

    by_name = {plan.name: plan for plan in rivals}
    return planning.contest(contender(ours), [contender(each) for each in rivals], keeps=keeps)
