"""Exact budgets and the frontier against brute force, on random tables with real formats."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kl_lens.base.errors import BudgetError, PlanError
from kl_lens.planning import (
    SpeedModel,
    build_problem,
    frontier,
    plan_for_budget,
    plan_for_loss,
)
from kl_lens.run.records import SensitivityTable
from kl_lens.weights.formats import get_format
from tests.planning.tables import best, component, table_of

FORMATS = ("int8", "int4", "q8_0")
quick = settings(max_examples=30)


@dataclass(frozen=True)
class Candidate:
    bytes: int
    kl: float
    seconds: float


@dataclass(frozen=True)
class Instance:
    table: SensitivityTable
    speed: SpeedModel

    def brute_force(self, *, keep_fused: bool = True) -> Iterator[Candidate]:
        """Every assignment, priced here and not by the code under test."""
        free = self.table.candidates
        fixed = sum(2 * c.parameters for c in self.table.components if not c.quantizable)
        kl = {
            (m.component, m.format): m.metrics["kl_teacher_to_student"].value
            for m in self.table.measurements
        }
        options = [["fp16"] + [f for f in FORMATS if (c.name, f) in kl] for c in free]
        for formats in itertools.product(*options):
            chosen = dict(zip((c.name for c in free), formats, strict=True))
            if keep_fused and any(
                chosen[c.name] != chosen[s] for c in free for s in c.fused_with
            ):
                continue
            yield Candidate(
                fixed
                + sum(
                    get_format(f).bytes(c.shape)
                    for c, f in zip(free, formats, strict=True)
                ),
                math.fsum(max(0.0, kl.get(pair, 0.0)) for pair in chosen.items()),
                self.speed.constant
                + math.fsum(
                    self.speed.rates[f] * get_format(f).bytes(c.shape)
                    for c, f in zip(free, formats, strict=True)
                    if c.name != self.speed.lookup
                ),
            )


# Wide ranges, exact ties, zeros, and the slightly negative values that a noise floor produces.
damage = st.one_of(
    st.floats(1e-9, 1e-3),
    st.floats(1e-3, 20.0),
    st.sampled_from([0.0, -1e-9, 1e-4, 2e-4, 0.5]),
)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    count = draw(st.integers(1, 5))
    shapes = [
        (draw(st.integers(1, 40)), 32 * draw(st.integers(1, 4))) for _ in range(count)
    ]
    names = [f"c{i}" for i in range(count)]
    parts = [component(n, s) for n, s in zip(names, shapes, strict=True)]
    if count >= 3 and draw(st.booleans()):
        trio = names[: draw(st.integers(2, 3))]
        parts = [
            replace(c, fused_with=tuple(n for n in trio if n != c.name))
            if c.name in trio
            else c
            for c in parts
        ]
    kls = {
        (n, f): draw(damage)
        for n in names
        for f in FORMATS
        if draw(st.integers(0, 9)) > 0
    }
    rate = st.one_of(st.floats(1e-9, 1e-5), st.sampled_from([0.0, 1e-6]))
    rates = {name: draw(rate) for name in ("fp16", *FORMATS)}
    alone = [None, *(c.name for c in parts if not c.fused_with)]
    speed = SpeedModel(
        draw(st.sampled_from([0.0, 1e-3])),
        rates,
        1e-6,
        lookup=draw(st.sampled_from(alone)),
    )
    parts.append(component("conv1d", (draw(st.integers(1, 9)), 1, 4), quantizable=False))
    return Instance(table_of(parts, kls, head="c0"), speed)


def within(plans: list[Candidate], share: float) -> int:
    """A size between the smallest and the largest plan's."""
    sizes = [p.bytes for p in plans]
    return int(min(sizes) + share * (max(sizes) - min(sizes)))


@quick
@given(instances(), st.floats(0, 1), st.booleans())
def test_least_kl_within_bytes(
    instance: Instance, share: float, keep_fused: bool
) -> None:
    plans = list(instance.brute_force(keep_fused=keep_fused))
    budget = within(plans, share)
    solution = best(instance.table, max_bytes=budget, keep_fused=keep_fused)
    assert solution.totals.bytes <= budget
    least = min(p.kl for p in plans if p.bytes <= budget)
    assert solution.totals.kl == pytest.approx(least, rel=1e-9, abs=1e-15)
    assert solution.gap < 1e-6
    assert solution.plan.bytes == solution.totals.bytes
    assert solution.plan.predicted_kl == pytest.approx(solution.totals.kl, rel=1e-12)


@quick
@given(instances(), st.data())
def test_least_bytes_within_kl(instance: Instance, data: st.DataObject) -> None:
    plans = list(instance.brute_force())
    # Exactly on a plan's own KL, where a rounding error would decide, or anywhere.
    limit = data.draw(
        st.one_of(
            st.sampled_from([p.kl for p in plans]), st.floats(0, max(p.kl for p in plans))
        )
    )
    solution = best(instance.table, max_kl=limit)
    assert solution.minimised == "bytes"
    assert solution.totals.kl <= limit
    slack = 1e-12 * limit  # sums in another order may differ in the last digit
    assert solution.totals.bytes <= min(
        p.bytes for p in plans if p.kl <= limit - slack or p.kl == 0
    )
    assert solution.totals.bytes >= min(p.bytes for p in plans if p.kl <= limit + slack)


@quick
@given(
    instances(),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["min_speed", "max_kl"]),
)
def test_two_limits_together(
    instance: Instance, share: float, part: float, limited: str
) -> None:
    plans = list(instance.brute_force())
    quantity = "seconds" if limited == "min_speed" else "kl"
    values = [getattr(p, quantity) for p in plans]
    most = max(1e-12, (min(values) + part * (max(values) - min(values))) * (1 + 1e-9))
    limits = {
        "max_bytes": within(plans, share),
        limited: 1 / most if limited == "min_speed" else most,
    }
    problem = build_problem(instance.table, speed=instance.speed)
    fits = [p for p in plans if p.bytes <= limits["max_bytes"]]
    possible = [p for p in fits if getattr(p, quantity) <= most * (1 - 1e-12)]
    if not possible:
        with pytest.raises(BudgetError, match="cannot be met together"):
            plan_for_budget(problem, **limits)
        return
    solution = plan_for_budget(problem, **limits)
    assert solution.totals.bytes <= limits["max_bytes"]
    assert getattr(solution.totals, quantity) <= most * (1 + 1e-15)
    assert solution.totals.kl == pytest.approx(
        min(p.kl for p in possible), rel=1e-8, abs=1e-15
    )
    assert solution.gap < 1e-6
    fastest = plan_for_budget(problem, max_bytes=limits["max_bytes"], minimise="seconds")
    assert fastest.totals.seconds == pytest.approx(
        min(p.seconds for p in fits), rel=1e-9, abs=1e-15
    )


@quick
@given(instances())
def test_no_plan_beats_the_frontier(instance: Instance) -> None:
    plans = list(instance.brute_force())
    points = frontier(build_problem(instance.table))
    for point in points:
        least = min(p.kl for p in plans if p.bytes <= point.file_bytes)
        assert point.predicted_kl == pytest.approx(least, rel=1e-9, abs=1e-15)
    assert points[0].file_bytes == min(p.bytes for p in plans)
    assert points[-1].predicted_kl == pytest.approx(min(p.kl for p in plans), abs=1e-15)


@quick
@given(instances())
def test_the_interaction_of_a_run_multiplies_every_prediction_and_changes_no_plan(
    instance: Instance,
) -> None:
    plain = build_problem(instance.table)
    corrected = build_problem(instance.table, interaction=1.25)
    middle = sum(plain.reach("bytes")) / 2
    expected = plan_for_budget(plain, max_bytes=middle).plan
    plan = plan_for_budget(corrected, max_bytes=middle).plan
    assert plan.predicted_kl == pytest.approx(1.25 * (expected.predicted_kl or 0.0))
    assert plan.interaction == 1.25
    assert (plan.bytes or 0) <= middle
    for point, other in zip(frontier(corrected), frontier(plain), strict=True):
        assert point.file_bytes == other.file_bytes
        assert point.predicted_kl == pytest.approx(1.25 * other.predicted_kl)
    limit = sum(corrected.reach("kl")) / 2
    smallest = plan_for_budget(corrected, max_kl=limit).plan
    assert (smallest.predicted_kl or 0.0) <= limit * (1 + 1e-9)


def test_everything_counts_and_the_head_can_stay_out() -> None:
    parts = [
        component("a"),
        component("head"),
        component("norm", (64,), quantizable=False),
    ]
    kls = {(n, "int4"): 0.1 for n in ("a", "head")}
    table = table_of(parts, kls)
    plan = best(table, max_bpw=16, max_kl=1, minimise="bytes", no_head=True).plan
    assert plan.assignment == {"a": "int4", "head": "fp16"}
    assert plan.bytes == get_format("int4").bytes((64, 64)) + 2 * 64 * 64 + 2 * 64


def test_impossible_budgets_answer_with_the_range() -> None:
    table = table_of([component("head", (1000, 1000))], {("head", "int8"): 0.25})
    with pytest.raises(
        BudgetError,
        match=r"--max-bytes 5 B cannot be met: .* 1.00 MB to 2.00 MB \(8.016 to 16",
    ) as e:
        best(table, max_bytes=5)
    assert e.value.exit_code == 2
    for further in (
        {},
        {"max_bytes": 600_000},
    ):  # the tighter one is named, as it was given
        with pytest.raises(
            BudgetError, match=r"^--max-bpw 4 cannot be met: .* \(8.016 to 16"
        ):
            best(table, max_bpw=4, **further)
    with pytest.raises(BudgetError, match=r"^--max-bytes 400.00 kB cannot be met"):
        best(table, max_bpw=4, max_bytes=400_000)
    with pytest.raises(
        BudgetError, match=r"--max-loss -1 nats cannot be met: .* 0 nats to 0.25 nats"
    ):
        best(table, max_kl=-1)
    with pytest.raises(
        BudgetError, match=r"^--max-bpw 12 and --max-loss 0.1 nats cannot be met together"
    ):
        best(table, max_bpw=12, max_kl=0.1)
    speed = SpeedModel(0.002, {"fp16": 1e-8, "int8": 1e-8}, 1e-8)
    with pytest.raises(
        BudgetError,
        match=r"--min-speed 200 tokens/s cannot be met: .* 83.\d+ tokens/s to 45.45 tokens/s",
    ):
        best(table, min_speed=200, speed=speed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no budget given"),
        ({"min_speed": 1.0}, "needs the speeds of the target's files"),
        (
            {"min_speed": 0, "speed": SpeedModel(0.0, {}, 1.0)},
            "--min-speed 0 is not a limit",
        ),
        ({"max_kl": math.nan}, "nan is not a limit"),
        ({"max_kl": 1.0, "minimise": "beauty"}, "cannot minimise 'beauty'"),
        ({"max_kl": 1.0, "recipes": ["int4"]}, "no measurements at int4"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        best(table_of([component("head")], {("head", "int8"): 0.25}), **options)


def test_hopeless_formats_do_not_spoil_the_scaling() -> None:
    """A head at 4 bits can cost thousands of nats; the rest differs in the ninth digit."""
    names = [f"c{i}" for i in range(12)]
    kls = {(n, "int4"): 1e-6 * (1 + 1e-3 * i) for i, n in enumerate(names)} | {
        ("c0", "int4"): 4e4
    }
    table = table_of([component(n) for n in names], kls, head="c0")
    full = 2 * 64 * 64
    small = get_format("int4").bytes((64, 64))
    solution = best(table, max_bytes=7 * full + 5 * small)
    assert [n for n, f in solution.plan.assignment.items() if f == "int4"] == names[1:6]
    speed = SpeedModel(1.0, {}, 1e-9)
    limited = best(table, max_bytes=7 * full + 5 * small, min_speed=0.5, speed=speed)
    assert limited.plan.assignment == solution.plan.assignment


def test_limits_next_to_nothing() -> None:
    kls = {
        ("a", "int8"): 0.0,
        ("a", "int4"): 1e-300,
        ("head", "int8"): 0.5,
        ("head", "int4"): 0.7,
    }
    table = table_of([component("a"), component("head")], kls)
    for limit in (0.0, 5e-324, 1e-310, 1e-301):
        assert best(table, max_kl=limit).plan.assignment == {"a": "int8", "head": "fp16"}
    assert best(table, max_kl=1e-300).plan.assignment == {"a": "int4", "head": "fp16"}


def test_400_components_by_6_formats_are_proven_silently(
    capfd: pytest.CaptureFixture[str],
) -> None:
    generator = np.random.default_rng(7)
    formats = ("int8", "q6_k", "q5_k", "q4_k", "int4")
    shapes = [(1536, 512), (256, 768), (768, 256), (512, 768)]
    parts = [component(f"c{i}", shapes[i % 4]) for i in range(400)]
    kls = {
        (c.name, f): float(scale * factor * generator.lognormal(0, 0.3))
        for c, scale in zip(parts, generator.lognormal(-9, 2, 400), strict=True)
        for f, factor in zip(formats, (0.004, 0.03, 0.2, 0.7, 1.0), strict=True)
    }
    table = table_of(parts, kls, head="c0")
    solution = best(table, max_bpw=5.1)
    assert solution.gap == 0.0
    assert solution.totals.bytes * 8 <= 5.1 * sum(c.parameters for c in parts)
    assert capfd.readouterr().out == ""


def world() -> SensitivityTable:
    kls = {
        (f"c{i}", fmt): 0.001 * 1.5**i * factor
        for i in range(12)
        for fmt, factor in (("int4", 1.0), ("int8", 0.01))
    }
    return table_of([component(f"c{i}") for i in range(12)], kls, head="c0")


@pytest.mark.parametrize("exaggeration", [0.5, 1.0, 1.3, 3.0])
def test_the_plan_fits_and_is_nearly_the_smallest(exaggeration: float) -> None:
    table = world()
    kl = {
        (m.component, m.format): m.metrics["kl_teacher_to_student"].value
        for m in table.measurements
    }

    def truth(assignment: Mapping[str, str]) -> float:
        return exaggeration * sum(kl.get(item, 0.0) for item in assignment.items())

    result = plan_for_loss(build_problem(table), truth, max_loss=0.05, evaluations=8)
    assert result.loss <= 0.05
    assert truth(result.plan.assignment) == result.loss
    least = best(table, max_kl=0.05 / exaggeration).plan.bytes or 0
    assert least <= (result.plan.bytes or 0) <= 1.1 * least
    assert result.evaluations <= 8


def test_a_loss_that_no_plan_meets_is_reported() -> None:
    with pytest.raises(BudgetError, match=r"the closest lost 0\.7"):
        plan_for_loss(build_problem(world()), lambda assignment: 0.7, max_loss=0.01)
    with pytest.raises(BudgetError, match="FP16"):
        plan_for_loss(build_problem(world()), lambda assignment: 0.0, max_loss=0.0)
    with pytest.raises(BudgetError, match="is nan; use more held-out text"):
        plan_for_loss(build_problem(world()), lambda assignment: math.nan, max_loss=0.01)
