"""Ranking: τ is near one where a metric tells the truth, and noise is called noise."""

import json

import numpy as np
import pytest

from kl_lens.judging.ranking import rank
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from tests.samples import window_of


def _name(index: int) -> str:
    return f"c{index}" if index else "head"


def _run(tmp_path, damage_noise: float, candidates: int = 12) -> Run:
    """Damage equal to KL up to noise; squared errors that rank the other way round."""
    random = np.random.default_rng(0)
    run = Run.create(tmp_path)
    run.identify(
        {
            "model": "m",
            "model_type": "mamba",
            "head": "head",
            "embedding": "e",
            "components": [],
        }
    )
    for role, seed in ((CALIBRATION, 1), (EVALUATION, 2)):
        run.identify_text(
            role, {"length": 10, "seed": seed}, [f"{role}{w}" for w in range(20)]
        )
    run.store_teacher(EVALUATION, [(w, 10, 20.0) for w in range(20)])
    for index in range(candidates):
        name = _name(index)
        kl = 0.01 * (index + 1)
        calibration = [
            window_of(w, 10, kl, 1.1 * kl, 1 / (index + 1), 0.0) for w in range(20)
        ]
        held_out = [
            window_of(w, 10, kl, 1.1 * kl, 1.0, kl + damage_noise * random.normal())
            for w in range(20)
        ]
        run.store_samples(CALIBRATION, name, "int4", calibration, 1.0, "float32")
        run.store_samples(EVALUATION, name, "int4", held_out, 1.0, "float32")
    return run


def _tau(ranking, metric: str, with_head: bool = True) -> float:
    wanted = ("perplexity", metric, with_head)
    (tau,) = {
        c.tau for c in ranking.correlations if (c.damage, c.metric, c.with_head) == wanted
    }
    return tau


def test_a_metric_that_orders_like_the_damage_has_tau_one(tmp_path) -> None:
    with _run(tmp_path, damage_noise=0.001) as run:
        ranking = rank(run)
    assert _tau(ranking, "kl_teacher_to_student") == pytest.approx(1.0)
    assert _tau(ranking, "mse") == pytest.approx(-1.0)
    assert _tau(ranking, "sqnr_db") == pytest.approx(-1.0), (
        "larger is better: turned round before comparing"
    )
    assert {c.candidates for c in ranking.correlations} == {12, 11}, (
        "with and without the head"
    )
    assert not any(r.is_noisy for r in ranking.reliabilities)
    assert ranking.perplexity == pytest.approx(np.exp(2.0))
    for correlation in ranking.correlations:
        if (
            correlation.metric != "delta_cross_entropy"
        ):  # zero for every candidate of this fixture
            assert correlation.low - 1e-9 <= correlation.tau <= correlation.high + 1e-9
    best = [
        c
        for c in ranking.correlations
        if c.metric == "kl_teacher_to_student" and c.with_head
    ]
    assert all(c.p_value < 0.01 for c in best)


def test_noise_in_the_labels_is_called_noise_and_does_not_touch_the_divergence(
    tmp_path,
) -> None:
    with _run(tmp_path, damage_noise=2.0) as run:
        ranking = rank(run)
    assert all(r.is_noisy for r in ranking.reliabilities)
    assert all(abs(r.split_half_tau) < 0.8 for r in ranking.reliabilities)
    wanted = ("divergence", "kl_teacher_to_student")
    assert min(
        c.tau for c in ranking.correlations if (c.damage, c.metric) == wanted
    ) == pytest.approx(1.0)


def test_the_first_windows_and_other_texts_stand_beside(tmp_path) -> None:
    with _run(tmp_path, damage_noise=0.001) as run:
        run.identify_text("calibration:novels", {"length": 10, "seed": 1}, ["x"])
        for index in range(12):
            windows = [window_of(0, 10, 1 / (index + 1), 1, 1, 0)]
            run.store_samples(
                "calibration:novels", _name(index), "int4", windows, 1.0, "float32"
            )
        ranking = rank(run)
    whole = {f"in domain, {count} of 20 windows" for count in (20, 2, 1)}
    assert {c.calibration for c in ranking.correlations} == whole | {
        "novels, 1 of 1 windows"
    }
    novels = [c for c in ranking.correlations if c.calibration.startswith("novels")]
    assert {round(c.tau, 6) for c in novels if c.metric == "kl_teacher_to_student"} == {
        -1.0
    }
    data = json.loads(json.dumps(ranking.to_json()))
    assert len(data["points"]) == 12
    assert data["points"][0]["delta_perplexity"]["value"] > 0
