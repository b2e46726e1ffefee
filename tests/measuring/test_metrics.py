"""The metrics against double precision, and against cases worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kl_lens.measuring.metrics import (
    DELTA_CROSS_ENTROPY,
    KL_STUDENT_TEACHER,
    KL_TEACHER_STUDENT,
    SAME_TOP,
    SQUARED_ERROR,
    TeacherRows,
    compare,
    kernels_hold,
    mended,
    window_metrics,
)
from kl_lens.model.tasks import UNCOUNTED
from kl_lens.run.readings import Reading, summarise
from tests.families import normal


def _in_double(teacher: Tensor, student: Tensor, targets: Tensor) -> np.ndarray:
    """The textbook definitions, in float64."""
    log_p = teacher.double().log_softmax(-1)
    log_q = student.double().log_softmax(-1)
    rows = torch.arange(len(targets))
    change = torch.where(
        targets >= 0,
        log_p[rows, targets.clamp(min=0)] - log_q[rows, targets.clamp(min=0)],
        0.0,
    )
    return torch.stack(
        [
            (log_p.exp() * (log_p - log_q)).sum(-1),
            (log_q.exp() * (log_q - log_p)).sum(-1),
            (teacher.double() - student.double()).square().sum(-1),
            change,
            (teacher.argmax(-1) == student.argmax(-1)).double(),
        ],
        1,
    ).numpy()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("vocabulary", [2, 1024, 5000])
@pytest.mark.parametrize("damage", [1e-3, 1.0, 10.0])
def test_metrics_equal_double_precision(
    kernel: bool, vocabulary: int, damage: float
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    teacher = 5 * torch.randn(40, vocabulary, generator=generator)
    student = teacher + damage * torch.randn(40, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (40,), generator=generator)
    targets[7] = -1
    assert kernels_hold(teacher.device), (
        "a wrong kernel would not be used, and nothing here would show it"
    )
    actual = compare(TeacherRows.of(teacher, targets), student, kernel=kernel)
    expected = _in_double(teacher, student, targets)
    # A single row's tiny divergence rests on differences of float32 logits (rounded at 1e-6); the mean does not.
    for column in (KL_TEACHER_STUDENT, KL_STUDENT_TEACHER):
        np.testing.assert_allclose(
            actual[:, column], expected[:, column], rtol=2e-3, atol=1e-10
        )
        assert actual[:, column].mean() == pytest.approx(
            expected[:, column].mean(), rel=1e-4
        )
    np.testing.assert_allclose(
        actual[:, SQUARED_ERROR], expected[:, SQUARED_ERROR], rtol=1e-5
    )
    np.testing.assert_allclose(
        actual[:, DELTA_CROSS_ENTROPY], expected[:, DELTA_CROSS_ENTROPY], atol=1e-5
    )
    assert actual[7, DELTA_CROSS_ENTROPY] == 0.0
    np.testing.assert_array_equal(actual[:, SAME_TOP], expected[:, SAME_TOP])


@settings(max_examples=50)
@given(st.floats(-100, 100), st.integers(0, 10**6))
def test_a_constant_added_to_all_logits_changes_nothing_but_sqnr(
    constant: float, seed: int
) -> None:
    """The paper's counter-example: the distribution is the same, yet the logits' SQNR is finite."""
    teacher = 3 * normal(4, 50, seed=seed)
    targets = torch.zeros(4, dtype=torch.long)
    rows = compare(TeacherRows.of(teacher, targets), teacher + constant)
    assert rows[:, KL_TEACHER_STUDENT].max() < 1e-9
    assert rows[:, KL_STUDENT_TEACHER].max() < 1e-9
    np.testing.assert_allclose(
        rows[:, SQUARED_ERROR], 50 * constant**2, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_damage_far_below_float32_resolution_is_still_measured(kernel: bool) -> None:
    """The textbook form in float32 would give noise of 1e-7 here; the divergence is about 5e-9."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(2000, 64, generator=generator)
    student = teacher + 1e-4 * torch.randn(2000, 64, generator=generator)
    targets = torch.full((2000,), -1)
    actual = compare(TeacherRows.of(teacher, targets), student, kernel=kernel)[
        :, KL_TEACHER_STUDENT
    ].mean()
    expected = _in_double(teacher, student, targets)[:, KL_TEACHER_STUDENT].mean()
    assert expected < 1e-8
    assert actual == pytest.approx(expected, rel=1e-4)


def test_impossible_tokens_do_not_make_nan() -> None:
    teacher = torch.tensor([[200.0, 0.0, -200.0]])
    student = torch.tensor([[-200.0, 0.0, 200.0]])
    for kernel in (True, False):
        (row,) = compare(
            TeacherRows.of(teacher, torch.tensor([0])), student, kernel=kernel
        )
        assert np.isfinite(row).all()
        assert row[KL_TEACHER_STUDENT] == pytest.approx(400, rel=1e-4)


def test_rows_in_which_a_kernel_overflowed_are_mended_beside_other_objectives() -> None:
    rows = np.array([[1.0, 2, 3, 4, 5, 6], [np.inf, 2, 3, 4, 5, 7]])
    logits = torch.zeros(1, 8)
    teacher = TeacherRows.of(logits, torch.tensor([0]))
    again = mended(rows, lambda bad: (teacher, logits))
    assert again.tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 7]]


def _window(index: int, kl: float, tokens: int = 4) -> Reading:
    rows = np.zeros((tokens, 5))
    rows[:, KL_TEACHER_STUDENT] = kl
    rows[:, SQUARED_ERROR] = 8.0
    targets = torch.tensor([[*range(tokens - 1), -1]])
    (window,) = window_metrics(
        [index], rows, np.full(tokens, 800.0), targets, vocabulary=8
    )
    return window


def test_a_row_behind_bos_counts_nowhere() -> None:
    rows = np.arange(20.0).reshape(4, 5)
    powers = np.array([1.0, 2, 3, 4])
    whole, rest = (
        window_metrics([0], rows[first:], powers[first:], targets, vocabulary=8)
        for first, targets in (
            (0, torch.tensor([[UNCOUNTED, 5, 6, -1]])),
            (1, torch.tensor([[5, 6, -1]])),
        )
    )
    assert whole == rest
    assert (whole[0].tokens, whole[0].targets) == (3, 2)


def test_means_are_per_token_with_errors_over_windows() -> None:
    summary = summarise([_window(0, 1.0), _window(1, 2.0), _window(2, 3.0)])
    assert summary["kl_teacher_to_student"].value == pytest.approx(2.0)
    assert summary["kl_teacher_to_student"].standard_error == pytest.approx(
        1 / math.sqrt(3)
    )
    assert summary["mse"].value == pytest.approx(1.0), "8 squared units over 8 columns"
    assert summary["sqnr_db"].value == pytest.approx(20.0), "signal 100 times the noise"
    assert summary["kl_max"].value == pytest.approx(3.0)
    assert math.isnan(
        summarise([_window(0, 1.0)])["kl_teacher_to_student"].standard_error
    )
