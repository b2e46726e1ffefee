"""The rule of llama.cpp's pull request 15550, `llama-quantize --target-bpw`, as plans.

Each tensor gets the type that makes the sum of errors smallest within a number of bits per weight. The error of a type
is, for each row, the squared error over the squared weights, both weighted with the importance matrix, whose outliers
are capped; without the 1 % of rows at either end, times the number of rows. Some errors are multiplied by constants:
outputs of feed-forwards by 6, the head by up to 3, attention by 1 + 2^(2 − bits). From the lower convex hull of each
tensor's types, the steps with the largest gain per byte are taken while they fit.

As published in 2026, for an importance matrix without means. Left out: IQ1 types and BF16, which we do not write, the
sampling of rows, and two caps on `ffn_down` (models with at least eight of them, and experts below 2.2 bits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.run.records import Component, Plan
from kl_lens.targets.gguf.stock import FileTensors
from kl_lens.weights.quantizers.methods import column_importance
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe

LATTICES = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "iq4_nl")
OTHERS = (
    "q2_k",
    "q3_k",
    "q4_0",
    "q4_1",
    "q4_k",
    "q5_0",
    "q5_1",
    "q5_k",
    "q6_k",
    "q8_0",
    FP16,
)
FEW_BITS = 2.2  # below, tensors are not favoured


@dataclass(frozen=True)
class Choice:
    recipe: Recipe
    bytes: int
    error: float

    def bits(self, weights: int) -> float:
        return 8 * self.bytes / weights


class BitsRule:
    def __init__(self, model: LoadedModel, statistics: StoredStatistics) -> None:
        self._model = model
        anatomy = model.anatomy
        self._parts = {
            name: tensor.part for name, tensor in FileTensors(model).part_tensors.items()
        }
        self._tied = anatomy.embedding == anatomy.head
        self._choices = {c.name: self._errors(c, statistics) for c in anatomy.candidates}
        self._weights = {c.name: c.parameters for c in anatomy.candidates}

    def plan(self, bits: float) -> Plan:
        """`bits`: of each weight that may be quantized. (Theirs counts norms and the like, in F32, as well.)"""
        room = round(bits * sum(self._weights.values()) / 8)
        hulls = {name: _hull(self._favoured(name, bits)) for name in self._choices}
        chosen = {name: hull[0] for name, hull in hulls.items()}
        room -= sum(choice.bytes for choice in chosen.values())
        steps = [
            (
                (before.error - after.error) / (after.bytes - before.bytes),
                name,
                before,
                after,
            )
            for name, hull in hulls.items()
            for before, after in pairwise(hull)
        ]
        for _, name, before, after in sorted(steps, key=lambda step: -step[0]):
            if chosen[name] is before and after.bytes - before.bytes <= room:
                room -= after.bytes - before.bytes
                chosen[name] = after
        assignment = {name: choice.recipe for name, choice in chosen.items()}
        return Plan(
            f"pr15550-{bits}",
            assignment,
            f"the rule of llama.cpp's pull request 15550 at {bits} bits",
        )

    def _errors(self, component: Component, statistics: StoredStatistics) -> list[Choice]:
        """Every type that fits, as ggml rounds it."""
        anatomy = self._model.anatomy
        name = component.name
        ends = name in (
            anatomy.head,
            anatomy.embedding,
        )  # without importance, as `llama-imatrix` leaves them
        weight = self._model.parameters_of(component)[0].detach().float()
        rows = weight.flatten(0, -2)
        importance = torch.ones(weight.shape[-1])
        if not ends:
            moments = statistics.of(name).second_moments
            stacked = moments if moments.dim() == 3 else moments[None]
            importance = torch.stack(
                [_capped(column_importance(matrix)) for matrix in stacked]
            )
            importance = importance.repeat_interleave(len(rows) // len(stacked), 0)
        norms = (importance * rows**2).sum(-1)
        attends = self._parts.get(name) in ("values", "keys", "attention")
        choices = {}
        for kind in OTHERS if ends else (*LATTICES, *OTHERS):
            method = "rtn" if ends or kind in ("q8_0", FP16) else "imatrix"
            recipe = fitting_recipe(Recipe(kind, method), weight.shape)[0]
            if recipe in choices:
                continue
            size = recipe.grid.bytes(weight.shape)
            bits = 8 * size / weight.numel()
            source = (
                _clipped(rows) if self._parts.get(name) == "down" and bits < 3 else rows
            )
            if source is rows:
                values = self._model.weights.values(name, recipe).flatten(0, -2)
            else:
                inputs = statistics.of(name)
                stored = recipe.quantizer.quantize(
                    source.reshape(weight.shape), recipe.grid, name, inputs
                )
                values = recipe.grid.dequantize(stored).flatten(0, -2)
            shares = (importance * (values - source) ** 2).sum(-1) / norms.clamp_min(
                1e-12
            )
            error = _trimmed_mean(shares) * len(rows)
            if attends:
                error *= 1 + 0.5 * 2 ** (3 - bits)
            choices[recipe] = Choice(recipe, size, error)
        return list(choices.values())

    def _favoured(self, name: str, bits: float) -> list[Choice]:
        """With errors multiplied for what it takes to be more important; `bits`: of all that is quantized."""
        weights = self._weights[name]
        factor = 1.0
        anatomy = self._model.anatomy
        if self._parts.get(name) == "down":
            if bits < FEW_BITS:
                return [
                    Choice(c.recipe, c.bytes, c.error * (1 + 2 ** (3 - c.bits(weights))))
                    for c in self._choices[name]
                ]
            factor = 6.0
        elif name == anatomy.head and not self._tied:
            factor = 3.0
        elif self._parts.get(name) == "values":
            factor = 1.25
        elif name == anatomy.head and bits >= FEW_BITS:
            share = weights / sum(self._weights.values())
            factor = 2.5 if share <= 0.1 else max(1.25, 2.5 * (1 - 3 * (share - 0.1)))
        return [Choice(c.recipe, c.bytes, factor * c.error) for c in self._choices[name]]


def _hull(choices: list[Choice]) -> list[Choice]:
    """From the smallest on, those where every further byte gains less than the one before."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bytes, c.error)):
        if hull and (choice.bytes == hull[-1].bytes or choice.error >= hull[-1].error):
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(first: Choice, second: Choice) -> float:
    return (second.error - first.error) / (second.bytes - first.bytes)


def _capped(importance: torch.Tensor) -> torch.Tensor:
    """Cut at four deviations above the median, on a logarithmic scale."""
    logs = importance.log()
    deviation = (logs - logs.median()).abs().median()
    if deviation <= 1e-6 * max(1.0, abs(float(logs.median()))):
        return importance
    return importance.clamp_max(math.exp(float(logs.median() + 4 * 1.4826 * deviation)))


def _clipped(rows: torch.Tensor) -> torch.Tensor:
    """Cut at four standard deviations of each row."""
    mean = rows.mean(-1, keepdim=True)
    spread = rows.std(-1, correction=0, keepdim=True)
    return rows.clamp(mean - 4 * spread, mean + 4 * spread)


def _trimmed_mean(values: torch.Tensor) -> float:
    cut = len(values) // 100
    return float(values.sort().values[cut : len(values) - cut].double().mean())
