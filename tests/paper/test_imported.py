"""Budgets on published measurements: the number called KL(teacher ‖ student) there is none."""

from __future__ import annotations

import pytest

from kl_lens.planning import prediction_metric
from kl_lens.run.records import SensitivityTable
from tests.planning.tables import best, component, measurement, seed_table


def published_table() -> SensitivityTable:
    """As published: 5e8 for everything in one direction, and the damage in the other."""
    damage = {
        ("head", "int4"): 3575.0,
        ("head", "int8"): 101.0,
        ("in_proj", "int4"): 20.9,
        ("in_proj", "int8"): 0.07,
    }
    measurements = tuple(
        measurement(name, fmt, kl_teacher_to_student=4.9e8 - kl, kl_student_to_teacher=kl)
        for (name, fmt), kl in damage.items()
    )
    parts = (component("head", (128, 64)), component("in_proj", (128, 64)))
    return SensitivityTable("published", "mamba", parts, "head", "head", measurements)


def test_the_direction_that_is_a_kl_is_chosen_and_said() -> None:
    metric, why = prediction_metric(published_table())
    assert metric == "kl_student_to_teacher"
    assert why is not None
    assert "no value of kl_teacher_to_student can be a KL (about 4.9e+08)" in why
    plan = best(published_table(), max_bpw=8.5, name="mine").plan
    # By the garbage the head, with the larger damage, would look like the better one to quantize.
    assert plan.assignment == {"head": "int8", "in_proj": "int8"}
    assert plan.predicted_kl == pytest.approx(101.07)
    assert plan.notes["metric"] == plan.notes["predicted_by"] == "kl_student_to_teacher"


def test_the_published_lists_of_mamba_130m() -> None:
    plan = best(seed_table(), max_bpw=9.0).plan
    assert plan.notes["metric"] == "kl_student_to_teacher"
    # 194 entries, of which the sane ones add up to far less than one value of the garbage.
    assert plan.predicted_kl is not None
    assert plan.predicted_kl < 1000
