"""Which metric predicts real damage? Each candidate's metrics against its measured change in perplexity.

The damage is the paired change in cross-entropy on held-out text. A second measure is the KL from the original there,
which has no first-order term (docs/method.md). Kendall's τ says how well a metric, measured on calibration text, orders
the candidates by damage; its confidence interval is a bootstrap over candidates. The damage's own error limits how
large τ can get: the split-half τ of the damage shows that limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts load on first use: that takes seconds

from kl_lens.base.errors import RunError
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run, role_as
from kl_lens.run.readings import Reading, summarise
from kl_lens.run.records import Estimate, Record

HARM = "delta_cross_entropy"
# Metric → +1 if larger means more damage, -1 if less.
DIRECTIONS = {
    "kl_teacher_to_student": 1,
    "kl_student_to_teacher": 1,
    "mse": 1,
    "sqnr_db": -1,
    HARM: 1,
}
DAMAGES = {"perplexity": HARM, "divergence": "kl_teacher_to_student"}  # on held-out text
BOOTSTRAPS = 1000
# If the error is a larger share of the spread than this, noise affects the order as much as the damage does.
LARGE_ERROR_SHARE = 1 / 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Correlation(Record):
    """Kendall's τ between a metric on calibration text and the damage on held-out text."""

    # Perplexity (change in cross-entropy) or divergence (KL from the original).
    damage: str
    metric: str
    format: str
    with_head: bool
    calibration: str  # which text, and what share of its windows
    candidates: int
    tau: float
    low: float  # 95 % interval, bootstrap over candidates
    high: float
    p_value: float


@dataclass(frozen=True)
class Reliability(Record):
    """How precisely the damage is known, for one format."""

    format: str
    with_head: bool
    spread: float  # standard deviation of the damage over candidates, nats
    median_error: float  # median standard error of one candidate's damage, nats
    split_half_tau: float  # between the damage on even and on odd windows

    @property
    def is_noisy(self) -> bool:
        return not self.median_error <= LARGE_ERROR_SHARE * self.spread


@dataclass(frozen=True)
class Point(Record):
    """One candidate in the figure: its metrics and its damage."""

    component: str
    format: str
    is_head: bool
    metrics: dict[str, Estimate]
    damage: Estimate  # change in cross-entropy on held-out text, nats per token
    delta_perplexity: Estimate


@dataclass(frozen=True)
class Ranking(Record):
    """The result of `kl-lens paper`."""

    perplexity: float  # of the original model on the held-out text, per token
    evaluation_tokens: int
    points: tuple[Point, ...]
    correlations: tuple[Correlation, ...]
    reliabilities: tuple[Reliability, ...]


def rank(run: Run, shares: Sequence[float] = (1.0, 0.1, 0.05), seed: int = 0) -> Ranking:
    """Correlates every metric with the damage, for each format, with and without the head.

    For each share, the first so many calibration windows are used. Other calibration texts of the run (roles
    `calibration:…`) are used whole.
    """
    windows = _samples(run, EVALUATION)
    if not windows:
        raise RunError(
            f"{run.folder} holds no damage measurements; run: kl-lens paper --run {run.folder}"
        )
    damage = {key: summarise(samples) for key, samples in windows.items()}
    entropy, tokens = run.teacher_cross_entropy(EVALUATION)
    head = run.identity["head"]
    calibrations = {
        role: _samples(run, role)
        for role in run.roles()
        if role.partition(":")[0] == CALIBRATION
    }
    perplexity = math.exp(entropy)
    points = []
    for key, samples in sorted(calibrations.get(CALIBRATION, {}).items()):
        if key not in damage:
            continue
        harm = damage[key][HARM]
        grown = math.exp(min(harm.value, 700.0))
        error = perplexity * grown * harm.standard_error
        delta = Estimate(perplexity * (grown - 1), error)
        points.append(Point(*key, key[0] == head, summarise(samples), harm, delta))
    correlations: list[Correlation] = []
    reliabilities: list[Reliability] = []
    formats = sorted({format_name for _, format_name in damage})
    for format_name, with_head in itertools.product(formats, (True, False)):
        keys = [k for k in damage if k[1] == format_name and (with_head or k[0] != head)]
        if len(keys) < 3:
            continue
        reliability = _reliability([windows[key] for key in keys])
        reliabilities.append(Reliability(format_name, with_head, *reliability))
        for role, candidates in calibrations.items():
            common = [key for key in keys if key in candidates]
            if len(common) < 3:
                continue
            longest = max(map(len, candidates.values()))
            # With few windows, 10 % and 5 % can both mean one.
            parts = shares if role == CALIBRATION else (1.0,)
            for count in dict.fromkeys(max(1, round(part * longest)) for part in parts):
                text = role.partition(":")[2] or "in domain"
                label = f"{text}, {count} of {longest} windows"
                metrics = []
                for key in common:
                    first = max(1, round(count / longest * len(candidates[key])))
                    metrics.append(summarise(candidates[key][:first]))
                about = (format_name, with_head, label, len(common))
                damages = [damage[key] for key in common]
                correlations += _correlations(metrics, damages, seed, about)
    return Ranking(
        perplexity, tokens, tuple(points), tuple(correlations), tuple(reliabilities)
    )


def _reliability(windows: Sequence[list[Reading]]) -> tuple[float, float, float]:
    """Spread of the candidates' damage, its median error, and τ between its halves."""
    harms = [summarise(samples)[HARM] for samples in windows]
    halves = [
        [summarise(samples[start::2] or samples)[HARM].value for samples in windows]
        for start in (0, 1)
    ]
    return (
        float(np.std([harm.value for harm in harms], ddof=1)),
        float(np.median([harm.standard_error for harm in harms])),
        float(scipy.stats.kendalltau(*halves).statistic),
    )


def _samples(run: Run, role: str) -> dict[tuple[str, str], list[Reading]]:
    """The run's default kind of measurements: weights alone, or with a target's activations."""
    role = role_as(role, run.usual_target)
    return {key: run.samples(role, *key) for key in run.measured_windows(role)}


Metrics = Sequence[dict[str, Estimate]]  # of each candidate


def _correlations(
    metrics: Metrics, damage: Metrics, seed: int, about: tuple[str, bool, str, int]
) -> Iterator[Correlation]:
    for kind, metric in itertools.product(DAMAGES, DIRECTIONS):
        values = DIRECTIONS[metric] * np.array([m[metric].value for m in metrics])
        target = np.array([harm[DAMAGES[kind]].value for harm in damage])
        result = scipy.stats.kendalltau(values, target)
        interval = _interval(values, target, seed)
        yield Correlation(
            kind, metric, *about, float(result.statistic), *interval, float(result.pvalue)
        )


def _interval(values: Floats, target: Floats, seed: int) -> tuple[float, float]:
    """95 % interval of τ-b by bootstrap. A draw is one weight per candidate, so all draws take three products."""
    count = len(values)
    x = np.sign(values[:, None] - values[None, :])
    y = np.sign(target[:, None] - target[None, :])
    random = np.random.default_rng(seed)
    draws = random.multinomial(count, np.full(count, 1 / count), BOOTSTRAPS)
    weights = draws.astype(float)

    def total(pairs: Floats) -> Floats:
        return np.einsum("bi,bi->b", weights @ pairs, weights)

    untied = np.sqrt(total(np.abs(x)) * total(np.abs(y)))
    drawn = total(x * y)[untied > 0] / untied[untied > 0]
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)
