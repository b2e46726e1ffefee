"""Sizes and losses of plans, alone and beside stock recipes: for `plan`, the staged search and `autopsy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from kl_lens import planning
from kl_lens.base.errors import PlanError
from kl_lens.base.units import human_bytes
from kl_lens.judging import choosing
from kl_lens.measuring.joint import JointResult, PlanMeter
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.model import LoadedModel
from kl_lens.model.carried import carried_by
from kl_lens.run.folder import INTERACTION, SCREENED, Run
from kl_lens.run.readings import KL
from kl_lens.run.records import (
    PREDICTED,
    Estimate,
    Measured,
    Measurement,
    Plan,
    SensitivityTable,
)
from kl_lens.study.memory import held_by
from kl_lens.study.session import Session
from kl_lens.study.settings import HeldOut, Limits
from kl_lens.targets import computed_as, get_target
from kl_lens.weights.recipes import FP16, Recipe, parsed

OUR_STOCK = "a stock recipe with our methods"
ROUNDS = 4  # of correcting a plan for the size of its file


class TargetPlanner:
    """Sizes and measures plans within limits for one target (None: weights alone, no file).

    The model is opened only when something has to be measured or sized.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        target: str | None = None,
        held_out: HeldOut | None = None,
        opened: Callable[[], LoadedModel] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`opened`: opens the run's model (default: from where the run found it)."""
        self.session = session
        self.run = run
        self._held_out = held_out or HeldOut()
        self._opened = opened or partial(session.model_of, run)
        self.target = get_target(target) if target else None
        self.limits = limits or Limits()

    @cached_property
    def held(self) -> planning.Held | None:
        """What is in memory beside the file; None: plans are for a size."""
        use = self.limits.use
        if use is None or self.target is None:
            return None
        carried = carried_by(self.model.config, self.model.name)
        return held_by(
            self.target, carried, use, self.run.states(), self.limits.memory or 0
        )

    def table(self) -> SensitivityTable:
        """The measurements to plan with. A staged search has measured what plans within its own limit use; within
        others they may use what was only predicted."""
        target = None if self.target is None else self.target.name
        chosen = (self.run.load(SCREENED, self.run.measured_role(target)) or {}).get(
            "limit"
        )
        return self.run.table(target=target, predicted=self.limits.given != chosen)

    @property
    def model(self) -> LoadedModel:
        return self._opened()

    @property
    def halves(self) -> tuple[PlanMeter, PlanMeter]:
        """Meters on both halves of the held-out text: the first decides, the second confirms. A limit on the loss is
        kept on both."""
        model = self.model
        held_out = self.session.held_out(self._held_out, self.run, model.task)
        middle = (len(held_out) + 1) // 2
        if middle == len(held_out):
            raise PlanError(
                "--held-out-windows must be at least 2: one half decides, the other confirms"
            )
        kind = None if self.target is None else computed_as(self.target)
        first = held_out.first(middle)
        second = held_out.after(middle)
        return self.session.meter(model, first, kind), self.session.meter(
            model, second, kind
        )

    def lost(self, assignment: Mapping[str, str], limits: Mapping[str, float]) -> float:
        """What a plan loses in nats per token, of what is limited, with one standard error: on little text plans would
        otherwise be too small. Of both halves the larger; the second is measured if the first is within the limit."""
        first, second = (half.measure for half in self.halves)
        loss = limited_loss(first(assignment), limits)
        decided = loss.value + loss.standard_error
        if not decided <= nats_allowed(limits):
            return decided
        loss = limited_loss(second(assignment), limits)
        return max(
            decided,
            loss.value
            + (0.0 if math.isnan(loss.standard_error) else loss.standard_error),
        )

    def keeps(self, assignment: Mapping[str, str], limits: Mapping[str, float]) -> bool:
        """Whether a plan loses no more than the limits allow, on both halves."""
        allowed = nats_allowed(limits)
        return math.isinf(allowed) or self.lost(assignment, limits) <= allowed

    def interaction(self, table: SensitivityTable, plans: Sequence[Plan]) -> float:
        """How much more whole plans lose than the sum of their parts, over all plans measured on the first half."""
        meter = self.halves[0]
        predictor = planning.Predictor(table)
        for plan in plans:
            meter.measure(plan.assignment)
        sums = [
            (predictor.total(assignment), result.kl.value)
            for assignment, result in meter.known
        ]
        return planning.interaction(
            (total.value, kl) for total, kl in sums if total is not None
        )

    def other_text(self, rivals: Sequence[Plan]) -> float:
        """How much more plans lose on the second half than on the first, from the rival that loses most: its ratio has
        the smallest error."""
        first, second = self.halves
        losses = [
            (second.measure(rival.assignment).kl.value, rival.assignment)
            for rival in rivals
        ]
        worst = max(losses, key=lambda loss: loss[0], default=None)
        return planning.interaction(
            [(first.measure(worst[1]).kl.value, worst[0])] if worst else []
        )

    def smallest(self, recipes: Sequence[str]) -> int:
        """Bytes that plans in these recipes need at least, as the solver counts them, before anything is measured."""
        chosen = find_candidates(self.model.anatomy, [*map(Recipe.parse, recipes)])[0]
        rows = (
            Measurement(
                recipe.component.name,
                str(recipe.recipe),
                {KL: Estimate(0.0)},
                0,
                0,
                PREDICTED,
                0.0,
            )
            for recipe in chosen
        )
        problem = planning.build_problem(
            replace(self.run.table(), measurements=tuple(rows)),
            metric=KL,
            target=self.target,
            fixed_bytes=self.fixed_bytes,
            held=self.held and replace(self.held, caches=()),
        )
        return round(problem.reach("bytes")[0])

    def sized(self, plan: Plan, *, exact: bool = True) -> Plan:
        """The plan with the size of its file; `exact=False`: a quick upper bound."""
        if self.target is None:
            return plan
        size = self.target.file_bytes(self.model, plan, exact=exact)
        return replace(
            plan, target=self.target.name, fixed_bytes=size - (plan.bytes or 0)
        )

    def fitted(
        self,
        make: Callable[[int], Plan],
        max_bytes: int | None,
        others: Sequence[Plan] = (),
    ) -> Plan:
        """The plan with the least predicted loss whose file fits: from `make(bytes besides the weights)`, called until
        the size is right, or one of `others`."""
        if self.target is None or max_bytes is None:
            return self.sized(make(0))
        fixed = self.fixed_bytes
        best: Plan | None = None
        for _ in range(ROUNDS):
            solution = make(fixed)
            plan = self.sized(solution)
            size = plan.file_bytes
            assert size is not None
            size += plan.held_bytes
            if size <= max_bytes and (best is None or _loses_less(plan, best)):
                best = plan
            # Correct the bytes besides the weights. A byte too many can cost a plan that just fits.
            wrong = plan.fixed_bytes - solution.fixed_bytes
            if wrong == 0 or (wrong > 0 and best is not None):
                break
            fixed += wrong if best is not None else max(wrong, size - max_bytes)
        for rival in others:
            # Check the weights first: most files need not be written.
            if (rival.bytes or 0) + self.fixed_bytes > max_bytes or (
                best and not _loses_less(rival, best)
            ):
                continue
            plan = self.sized(replace(rival, name=solution.name, limits=solution.limits))
            if (plan.file_bytes or 0) <= max_bytes:
                best = plan
        if best is not None:
            return best
        raise PlanError(
            f"no {self.target.title} file has at most {human_bytes(max_bytes)}; raise the budget"
        )

    @cached_property
    def fixed_bytes(self) -> int:
        """The bytes of the target's file besides the weights, for the FP16 plan."""
        if self.target is None:
            return 0
        weights = sum(2 * c.parameters for c in self.model.anatomy.components)
        return self.sized(
            Plan("fp16", {}, "fp16", bytes=weights), exact=False
        ).fixed_bytes

    def verified(self, plan: Plan, table: SensitivityTable, factor: float = 1.0) -> Plan:
        """The plan with its measured loss on the second half. Prediction: the sum of its parts, times `factor`."""
        meter = self.halves[1]
        events = self.session.events
        learnt = meter.model.weights.learnt_by(
            parsed(plan.assignment).values(), plan.statistics
        )
        result = meter.measure(plan.assignment, plan.caches)
        measured = Measured(
            result.kl,
            result.perplexity,
            result.original_perplexity,
            meter.text.label,
            len(result.windows),
        )
        plan = replace(plan, measured=measured, statistics=learnt)
        if (loss := plan.missed) is not None:
            quantity, most = (
                ("perplexity rises by", "drop")
                if "drop" in plan.limits
                else ("the KL is", "loss")
            )
            events.tell(
                f"{plan.name} misses its limit: {quantity} {loss} on {measured.place}, and at most "
                f"{plan.limits[most]:g} was asked for"
            )
        parts = planning.Predictor(table).total(plan.assignment)
        if parts is None:
            return plan
        parts = Estimate(parts.value + self._of_caches(plan), parts.standard_error)
        predicted = Estimate(factor * parts.value, factor * parts.standard_error)
        explained, message = planning.verify(predicted, result.kl)
        if not explained:
            events.warn(f"{plan.name}: {message}")
        notes = plan.notes | {"verification": message}
        return replace(
            plan, notes=notes, predicted_kl=predicted.value, interaction=factor
        )

    def _of_caches(self, plan: Plan) -> float:
        """What its caches lose by themselves."""
        choices = [
            (g.members[0], choice)
            for g in (self.held.caches if self.held else ())
            for choice in g.choices
        ]
        return sum(
            choice.kl
            for kind, choice in choices
            if plan.caches.get(kind) == choice.recipe
        )

    # -- stock recipes -----------------------------------------------------------------------------------------

    def beside_rivals(
        self, table: SensitivityTable, plans: Sequence[Plan], *, everything: bool
    ) -> list[Plan]:
        """The plans and the target's stock recipes, measured in the same way; a stock recipe that wins replaces the
        last plan. `everything`: all stock recipes, not only the usual ones."""
        rivals = self.rivals(table, plans[-1] if plans else None, everything=everything)
        factor = self.interaction(table, plans) * self.other_text(rivals)
        if self.target is not None:
            self.run.store(INTERACTION, self.target.name, factor)
        measured = [self.verified(plan, table, factor) for plan in (*plans, *rivals)]
        if not plans:
            return measured
        own_plan = measured[len(plans) - 1]
        stock = measured[len(plans) :]
        equal = next((plan for plan in stock if _stored(plan) == _stored(own_plan)), None)
        contest = self._contest(own_plan, [plan for plan in stock if plan is not equal])
        sentence = contest.sentence(equal.name if equal else None)
        # One window decides nothing, whatever the rivals are: the user should ask for more.
        events = self.session.events
        (events.tell if contest.unknown and contest.windows < 2 else events.note)(
            f"{own_plan.name}: {sentence}"
        )
        if contest.winner == own_plan.name:
            notes = own_plan.notes | ({"taken_over": equal.name} if equal else {})
            recommended = [replace(own_plan, contest=sentence, notes=notes)]
        else:
            winner = next(plan for plan in stock if plan.name == contest.winner)
            winning = replace(
                winner,
                name=own_plan.name,
                made_by=f"{winner.made_by}; replaces our own plan",
                limits=own_plan.limits,
                notes=winner.notes | {"taken_over": winner.name},
                contest=sentence,
            )
            recommended = [
                self.sized(replace(own_plan, name=f"{own_plan.name}.own")),
                self.sized(winning),
            ]
        return [*measured[: len(plans) - 1], *stock, *recommended]

    def corrected(self, plan: Plan) -> Plan:
        """With the interaction of the run in its prediction."""
        target = None if self.target is None else self.target.name
        factor = self.run.interaction(target)
        if plan.predicted_kl is None or plan.interaction != 1.0:
            return plan
        return replace(plan, predicted_kl=factor * plan.predicted_kl, interaction=factor)

    def improved_stock(self, problem: planning.Problem) -> list[Plan]:
        """The target's stock recipes with our methods. `problem`: without groups."""
        if self.target is None:
            return []
        stock = [recipe.assignment for recipe in self.target.stock_recipes(self.model)]
        predictor = problem.predictor
        return [
            planning.finished_plan(
                problem.table, "stock", assignment, OUR_STOCK, predictor=predictor
            )
            for assignment in planning.stock_with_our_methods(problem, stock)
        ]

    def rivals(
        self, table: SensitivityTable, ours: Plan | None, *, everything: bool
    ) -> list[Plan]:
        """The target's stock recipes as plans: all, or the usual ones and the largest that is no larger than ours."""
        assert self.target is not None
        stock = self.target.stock_recipes(self.model)
        caches = self.held.bytes({}) if self.held else 0  # with the runtime's own caches
        plans = {
            recipe.plan_name: replace(
                planning.finished_plan(
                    table,
                    recipe.plan_name,
                    dict(recipe.assignment),
                    recipe.origin,
                    family="stock",
                ),
                held_bytes=caches,
            )
            for recipe in stock
        }
        if everything:
            return [self.sized(plan) for plan in plans.values()]
        usual = {
            recipe.plan_name: self.sized(plans[recipe.plan_name])
            for recipe in stock
            if recipe.usual
        }
        size = (ours.file_bytes if ours else None) or 0
        # Reversed, so that of two equal sizes the one with an importance matrix comes first.
        below = [
            plan
            for plan in reversed(plans.values())
            if (plan.bytes or 0) + self.fixed_bytes <= size
        ]
        for plan in sorted(below, key=lambda plan: -(plan.bytes or 0)):
            nearest = self.sized(plan)
            if (nearest.file_bytes or 0) <= size:
                usual[nearest.name] = nearest
                break
        return list(usual.values())

    def _contest(self, ours: Plan, rivals: Sequence[Plan]) -> choosing.Contest:
        """On the second half of the text. All files are sized under our plan's name, because some contain it."""
        meter = self.halves[1]
        by_name = {plan.name: plan for plan in rivals}

        def contender(plan: Plan) -> choosing.Contender:
            size = self.sized(replace(plan, name=ours.name)).memory_bytes
            return choosing.Contender.on(
                plan.name, size, meter.measure(plan.assignment, plan.caches).windows
            )

        def keeps(rival: choosing.Contender) -> bool:
            return self.keeps(by_name[rival.name].assignment, ours.limits)

        return choosing.contest(
            contender(ours), [contender(rival) for rival in rivals], keeps=keeps
        )


def nats_allowed(limits: Mapping[str, float]) -> float:
    """The loss per token that a user's limits allow: of KL (`loss`), or of cross-entropy (`drop`)."""
    return (
        math.log1p(limits["drop"]) if "drop" in limits else limits.get("loss", math.inf)
    )


def limited_loss(result: JointResult, limits: Mapping[str, float]) -> Estimate:
    return result.delta_cross_entropy if "drop" in limits else result.kl


def _loses_less(plan: Plan, rival: Plan) -> bool:
    return (plan.predicted_kl or 0.0) < (rival.predicted_kl or 0.0)


def _stored(plan: Plan) -> dict[str, Recipe]:
    return {
        name: recipe for name, recipe in parsed(plan.assignment).items() if recipe != FP16
    }
