"""Cost, prediction, verification and the tables that show them."""

from __future__ import annotations

import pytest

from kl_lens.base.errors import PlanError
from kl_lens.planning import Predictor, cost_of, differences, finished_plan, verify
from kl_lens.run.records import Estimate, Plan, SensitivityTable
from tests.planning.tables import component, measurement

PARTS = (
    component("head", (100, 64), tied_with=["embedding"]),
    component("norm", (64,), quantizable=False),
    component("in_proj", (128, 64)),
    component("dt_proj", (64, 48)),
)


def test_bytes_by_hand() -> None:
    cost = cost_of(PARTS, {"in_proj": "int8", "dt_proj": "int4"})
    # FP16 head and norm; one byte, or half of one, per weight and an FP16 scale per row.
    assert cost.bytes == 2 * 6400 + 2 * 64 + (8192 + 2 * 128) + (1536 + 2 * 64)
    assert cost.parameters == 6400 + 64 + 8192 + 3072
    assert cost.bits_per_weight == pytest.approx(8 * cost.bytes / 17728)
    shares = {(s.recipe, s.quantizable): (s.components, s.parameters) for s in cost.shares}
    assert shares == {
        ("fp16", True): (1, 6400),
        ("int8", True): (1, 8192),
        ("int4", True): (1, 3072),
        ("fp16", False): (1, 64),
    }
    assert sum(s.share for s in cost.shares) == pytest.approx(1.0)


def test_assignments_that_name_the_wrong_things() -> None:
    with pytest.raises(PlanError, match="no component 'in_prj'"):
        cost_of(PARTS, {"in_prj": "int8"})
    with pytest.raises(PlanError, match="norm cannot be int8: it stays FP16"):
        cost_of(PARTS, {"norm": "int8"})


def table_with_errors() -> SensitivityTable:
    rows = [("in_proj", "int8", -1e-7, 1e-7), ("in_proj", "int4", 0.5, 0.01), ("dt_proj", "int4", 0.25, 0.02)]
    measurements = tuple(
        measurement(n, f, kl_teacher_to_student=Estimate(value, error)) for n, f, value, error in rows
    )
    return SensitivityTable("m", "mamba", PARTS, "head", "head", measurements)


def test_prediction_adds_up_and_clamps() -> None:
    predictor = Predictor(table_with_errors())
    assert predictor.total({"in_proj": "int4", "dt_proj": "int4", "head": "fp16"}) == Estimate(0.75, 0.03)
    assert predictor.total({"in_proj": "int8"}) == Estimate(0.0, 1e-7)
    assert predictor.total({"head": "int8"}) is None
    plan = finished_plan(table_with_errors(), "p", {"head": "int8"}, "test")
    assert plan.predicted_kl is None
    assert plan.notes["unmeasured"] == ["head"]


def test_verification_weighs_the_difference_against_the_errors() -> None:
    predicted = Estimate(0.10, 0.003)
    assert verify(predicted, Estimate(0.11, 0.004)).explained is True  # exactly 2 × hypot(3, 4) = 10
    worse = verify(predicted, Estimate(0.15, 0.004))
    assert worse.explained is False
    assert "(1.5 times)" in worse.message
    assert "warning" in worse.message
    assert "10.0 standard errors" in worse.message
    assert "add up to more" in worse.message
    assert "partly cancel" in verify(predicted, Estimate(0.05, 0.004)).message
    unknown = verify(Estimate(0.1), Estimate(0.5, 0.01))
    assert unknown.explained is None
    assert "without a known error" in unknown.message


def test_comparison_shows_where_plans_differ() -> None:
    one = Plan("one", {"in_proj": "int4"}, "test")
    two = Plan("two", {"in_proj": "int8", "dt_proj": "int4"}, "test")
    assert differences([one, two], PARTS) == {"in_proj": ("int4", "int8"), "dt_proj": ("fp16", "int4")}
    assert cost_of(PARTS, one.assignment).shares_text == "fp16 2 (53.4 %), int4 1 (46.2 %), kept 1 (0.4 %)"
    with pytest.raises(PlanError, match="at least two plans"):
        differences([one], PARTS)
