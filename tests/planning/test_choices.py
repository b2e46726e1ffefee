"""What a plan chooses from: recipes, what a target holds, what its file needs besides, and numbers that make sense."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kl_lens.base.errors import PlanError
from kl_lens.planning import (
    Predictor,
    build_problem,
    cost_of,
    finished_plan,
    frontier,
    interaction,
    verify,
)
from kl_lens.run.records import Estimate, SensitivityTable
from kl_lens.weights.quantizers import quantizer
from kl_lens.weights.quantizers.methods import Nearest
from tests.planning.tables import best, component, measurement, table_of

NAMES = ("head", "in_proj", "dt_proj")
PARTS = (
    component("head", (128, 64)),
    component("in_proj", (128, 64)),
    component("dt_proj", (64, 48)),
)


class Clever(Nearest):
    """A method that does half the damage; planning does not look at the weights."""

    name = "clever"


@pytest.fixture
def clever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantizer.QUANTIZERS, "clever", Clever())


def measured_table(*recipes: str) -> SensitivityTable:
    damage = {
        "int8": 0.01,
        "int4": 0.2,
        "int4+clever": 0.1,
        "INT4+clever": 0.1,
        "int4-g32+clever": 0.08,
    }
    return table_of(
        PARTS, {(name, recipe): damage[recipe] for name in NAMES for recipe in recipes}
    )


@pytest.mark.usefixtures("clever")
def test_a_method_costs_no_bytes_and_competes_with_plain_rounding() -> None:
    table = measured_table("int8", "int4", "int4+clever")
    plan = best(table, max_bytes=cost_of(PARTS, dict.fromkeys(NAMES, "int4")).bytes).plan
    assert set(plan.assignment.values()) == {"int4+clever"}
    assert plan.predicted_kl == pytest.approx(0.3)
    assert [share.recipe for share in cost_of(PARTS, plan.assignment).shares] == [
        "int4+clever"
    ]


@pytest.mark.usefixtures("clever")
def test_a_fallback_keeps_the_method() -> None:
    cost = cost_of(PARTS, {"dt_proj": "int4-g32+clever"})
    assert cost.stored["dt_proj"] == "int8+clever"
    assert "48 columns" in cost.fallbacks["dt_proj"]
    assert Predictor(measured_table("int4-g32+clever")).estimate(
        "dt_proj", "int8+clever"
    ) == Estimate(0.08, 0.0)


def a_target(why_not: Callable[[str, int], str | None]) -> Any:
    """One whose files add nothing; what it refuses depends on a format's name and on columns."""
    return SimpleNamespace(
        holds=lambda grid, shape: why_not(grid.name, shape[-1]),
        keeps=lambda component: None,
        overhead=lambda grid: 0,
        name="toy",
    )


def only_eight_bits(name: str, columns: int) -> str | None:
    return (
        None if name in ("fp16", "int8") else f"no kernel for {name} of {columns} columns"
    )


def test_a_plan_for_a_target_holds_only_what_it_can_hold() -> None:
    table = measured_table("int4", "int8")
    problem = build_problem(table, target=a_target(only_eight_bits))
    assert {c.recipe for g in problem.groups for c in g.choices} == {"fp16", "int8"}
    plan = best(table, max_kl=9.0, target=a_target(only_eight_bits)).plan
    assert set(plan.assignment.values()) == {"int8"}


def test_siblings_need_a_recipe_that_all_of_them_can_have() -> None:
    pair = [
        component("q", fused_with=["k"]),
        component("k", (64, 128), fused_with=["q"]),
        component("head"),
    ]
    table = table_of(
        pair, {(n, f): 0.1 for n in ("q", "k", "head") for f in ("int4", "int8")}
    )
    problem = build_problem(
        table,
        target=a_target(
            lambda name, columns: "no" if (name, columns) == ("int4", 128) else None
        ),
    )
    assert [{c.recipe for c in g.choices} for g in problem.groups] == [
        {"fp16", "int8"},
        {"fp16", "int8", "int4"},
    ]


def test_a_limit_in_bytes_is_the_files() -> None:
    table = measured_table("int4", "int8")
    weights = cost_of(PARTS, dict.fromkeys(NAMES, "int8")).bytes
    alone = best(table, max_bytes=weights)
    within = best(table, max_bytes=weights + 1000, fixed_bytes=1000)
    assert within.plan.assignment == alone.plan.assignment
    assert within.totals.bytes == weights + 1000
    assert (within.plan.bytes, within.plan.fixed_bytes) == (weights, 1000)
    assert within.plan.limits == {"bytes": weights + 1000}
    tight = best(table, max_bytes=weights + 999, fixed_bytes=1000)
    assert (tight.plan.bytes or 0) < weights
    # Bits per weight stay those of the weights.
    bits = 8 * weights / sum(p.parameters for p in PARTS)
    assert (
        best(table, max_bpw=bits, fixed_bytes=1000).plan.assignment
        == alone.plan.assignment
    )
    assert (
        frontier(build_problem(table, fixed_bytes=1000))[0].file_bytes
        == 1000 + cost_of(PARTS, dict.fromkeys(NAMES, "int4")).bytes
    )


def with_kl(value: float, error: float = 0.0) -> SensitivityTable:
    table = measured_table("int4", "int8")
    odd = measurement("in_proj", "int4", kl_teacher_to_student=Estimate(value, error))
    plausible = [
        m for m in table.measurements if (m.component, m.format) != ("in_proj", "int4")
    ]
    return replace(table, measurements=(*plausible, odd))


@pytest.mark.parametrize(
    ("value", "error", "complaint"),
    [
        (math.nan, 0.0, "which is not a number"),
        (-0.01, 0.0, "never negative"),
        (-0.0122, 0.003, "never negative"),  # more than four errors and the noise
        (5e8, 0.0, "far too large for a KL"),
        (1.001e4 * math.log(128), 0.0, "far too large for a KL"),  # of 128 tokens
    ],
)
def test_what_cannot_be_a_kl_is_not_optimised(
    value: float, error: float, complaint: str
) -> None:
    with pytest.raises(
        PlanError, match=f"in_proj in int4: kl_teacher_to_student is .*{complaint}"
    ):
        best(with_kl(value, error), max_bpw=6.0)
    with pytest.raises(PlanError, match="sqnr_db cannot be added up"):
        build_problem(measured_table("int4"), metric="sqnr_db")


def test_noise_below_zero_and_ruin_are_kls() -> None:
    assert best(with_kl(-1e-6), max_kl=0.0).plan.assignment["in_proj"] == "int4"
    assert (
        best(with_kl(-0.012, error=0.003), max_kl=0.0).plan.assignment["in_proj"]
        == "int4"
    )
    for ruin in (90.0, 0.999e4 * math.log(128), math.inf):
        assert best(with_kl(ruin), max_kl=0.5).plan.assignment["in_proj"] == "int8"


# -- cost, prediction, verification ---------------------------------------------------------------------------

WEIGHTS = (
    component("head", (100, 64), tied_with=["embedding"]),
    component("norm", (64,), quantizable=False),
    component("in_proj", (128, 64)),
    component("dt_proj", (64, 48)),
)


def test_bytes_by_hand() -> None:
    cost = cost_of(WEIGHTS, {"in_proj": "int8", "dt_proj": "int4"})
    # FP16 head and norm; one byte, or half of one, per weight and an FP16 scale per row.
    assert cost.bytes == 2 * 6400 + 2 * 64 + (8192 + 2 * 128) + (1536 + 2 * 64)
    assert cost.parameters == 6400 + 64 + 8192 + 3072
    assert cost.bits_per_weight == pytest.approx(8 * cost.bytes / 17728)
    shares = {
        (s.recipe, s.quantizable): (s.components, s.parameters) for s in cost.shares
    }
    assert shares == {
        ("fp16", True): (1, 6400),
        ("int8", True): (1, 8192),
        ("int4", True): (1, 3072),
        ("fp16", False): (1, 64),
    }
    assert sum(s.share for s in cost.shares) == pytest.approx(1.0)


def table_with_errors() -> SensitivityTable:
    rows = [
        ("in_proj", "int8", -1e-7, 1e-7),
        ("in_proj", "int4", 0.5, 0.01),
        ("dt_proj", "int4", 0.25, 0.02),
    ]
    measurements = tuple(
        measurement(n, f, kl_teacher_to_student=Estimate(value, error))
        for n, f, value, error in rows
    )
    return SensitivityTable("m", "mamba", WEIGHTS, "head", "head", measurements)


def test_prediction_adds_up_and_clamps() -> None:
    predictor = Predictor(table_with_errors())
    assert predictor.total(
        {"in_proj": "int4", "dt_proj": "int4", "head": "fp16"}
    ) == Estimate(0.75, 0.03)
    assert predictor.total({"in_proj": "int8"}) == Estimate(0.0, 1e-7)
    assert predictor.total({"head": "int8"}) is None
    plan = finished_plan(table_with_errors(), "p", {"head": "int8"}, "test")
    assert plan.predicted_kl is None
    assert plan.notes["unmeasured"] == ["head"]


def test_verification_weighs_the_difference_against_the_errors() -> None:
    predicted = Estimate(0.10, 0.003)
    assert verify(predicted, Estimate(0.11, 0.004))[0]  # exactly 2 × hypot(3, 4) = 10
    explained, message = verify(predicted, Estimate(0.15, 0.004))
    assert not explained
    for part in ("(1.5 times)", "warning", "10.0 standard errors", "add up to more"):
        assert part in message
    assert "partly cancel" in verify(predicted, Estimate(0.05, 0.004))[1]
    explained, message = verify(Estimate(0.1), Estimate(0.5, 0.01))
    assert explained
    assert "without a known error" in message


@pytest.mark.parametrize(
    ("pairs", "factor"),
    [
        ([], 1.0),
        ([(0.1, 0.2)], 2.0),
        ([(0.1, 0.2), (0.4, 0.2), (0.1, 0.8)], 2.0),
        ([(0.1, 0.3), (0.0, 9.0), (9.0, 0.0)], 3.0),  # nothing lost says nothing
    ],
)
def test_the_interaction_is_the_geometric_mean(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    assert interaction(pairs) == pytest.approx(factor)


def test_siblings_of_siblings_share_a_recipe() -> None:
    chain = [
        component("q", fused_with=["k"]),
        component("k", fused_with=["q", "v"]),
        component("v", fused_with=["k"]),
        component("head"),
    ]
    table = table_of(chain, {(part.name, "int8"): 0.1 for part in chain})
    problem = build_problem(table)
    assert [group.members for group in problem.groups] == [("q", "k", "v"), ("head",)]
    size = 3 * (64 * 64 + 2 * 64)
    assert [(c.recipe, c.bytes) for c in problem.groups[0].choices] == [
        ("fp16", 3 * 2 * 64 * 64),
        ("int8", size),
    ]
    assert problem.groups[0].choices[1].kl == pytest.approx(0.3)
