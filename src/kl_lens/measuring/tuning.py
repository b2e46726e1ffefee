"""Tunes a finished plan on text: the scales of its weights move so that the KL from the original falls.

Gradients go through the dequantized weights. Every scale gets a factor; their product is rounded in every step as the
file stores it (straight-through): to FP16, or to a whole number where ggml's blocks have small scales. Codes stay, and
so does the size of the file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from kl_lens.model import LoadedModel
from kl_lens.model.tasks import UNCOUNTED
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.scales import (
    scales_of,
    small_scales_of,
    with_scales,
    with_small_scales,
)
from kl_lens.weights.recipes import Recipe

LOGIT_BYTES = 1 << 30  # of one forward and backward pass


@dataclass(frozen=True)
class TuningRates:
    rate: float = 3e-3  # of Adam: the share by which a step moves a scale
    epochs: int = 2
    batch: int = 16  # windows per step; fewer where that leaves less than `steps`
    steps: int = 32  # per epoch, at least
    warm_up: float = 0.1  # share of the steps; then the rate falls to 0 along a cosine


def tuned(
    model: LoadedModel,
    recipes: Mapping[str, Recipe],
    ids: Tensor,
    rates: TuningRates | None = None,
    progress: Callable[[int, int], None] = lambda finished, steps: None,
) -> dict[str, Quantized]:
    """Component → its tuned form, for those of the plan that have FP16 scales. `ids`: the text, (windows, length);
    `progress` gets (steps done, steps)."""
    model.require_memory("tuning")
    rates = rates or TuningRates()
    parts = {
        name: _Tunable(model.weights.quantized(name, recipe), recipe)
        for name, recipe in recipes.items()
    }
    factors = [factor for part in parts.values() for factor in part.factors]
    if not factors:
        return {}
    student = _Student(model)
    optimizer = torch.optim.Adam(factors, betas=(0.9, 0.95))
    size = max(1, min(rates.batch, len(ids) // rates.steps))
    per_epoch = len(ids) // size
    steps = rates.epochs * per_epoch
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(
                len(ids), generator=torch.Generator().manual_seed(step)
            )
        share = min(1.0, (step + 1) / (rates.warm_up * steps + 1))
        optimizer.param_groups[0]["lr"] = (
            rates.rate * share * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        )
        batch = ids[order[step % per_epoch * size :][:size]].to(model.chain.device)
        optimizer.zero_grad()
        student.backward(batch, {name: part.values() for name, part in parts.items()})
        optimizer.step()
        progress(step + 1, steps)
    return {name: part.stored() for name, part in parts.items() if part.factors}


class _Tunable:
    """A stored weight as a function of the factors of its scales: Σ fp16(factor · scale) · basis. Small scales, where
    blocks have them, are rounded to whole numbers and multiplied in."""

    def __init__(self, quantized: Quantized, recipe: Recipe) -> None:
        self._format = recipe.grid
        self._quantized = quantized
        self._scales = [scale.float() for scale in scales_of(self._format, quantized)]
        self._small = small_scales_of(self._format, quantized)
        self._bases = [self._basis(index) for index in range(len(self._scales))]
        self._whole_factors = [
            torch.ones_like(scale, requires_grad=True) for scale in self._scales
        ]
        self._small_factors = [
            torch.ones_like(small.values, requires_grad=True) for small in self._small
        ]

    @property
    def factors(self) -> list[Tensor]:
        return [*self._whole_factors, *self._small_factors]

    def _basis(self, index: int) -> Tensor:
        """The values with one scale at 1 and the others at 0, (…, rows, blocks, groups, columns of a group)."""
        scales = [torch.zeros_like(scale) for scale in self._scales]
        scales[index] += 1
        bare = with_scales(self._format, self._quantized, scales)
        groups = 1
        if self._small:
            ones = [torch.ones_like(small.values) for small in self._small]
            bare = with_small_scales(self._format, bare, ones)
            groups = ones[0].shape[-1]
        return self._format.dequantize(bare).unflatten(
            -1, (self._scales[0].shape[-1], groups, -1)
        )

    def _stored_scales(self) -> tuple[list[Tensor], list[Tensor]]:
        """As the file has them, with gradients as if they were not rounded."""
        moved = [s * f for s, f in zip(self._scales, self._whole_factors, strict=True)]
        whole = [_rounded(exact, exact.half()) for exact in moved]
        small = []
        for part, factor in zip(self._small, self._small_factors, strict=True):
            exact = part.values * factor
            on_grid = exact.round().clamp(part.lowest, part.highest)
            small.append(_rounded(exact, on_grid))
        return whole, small

    def values(self) -> Tensor:
        """The float32 weight, with gradients."""
        if not self.factors:
            return self._format.dequantize(self._quantized)
        whole, small = self._stored_scales()
        scales = [scale.unsqueeze(-1) for scale in whole]
        if small:
            scales = [w * s for w, s in zip(scales, small, strict=True)]
        pairs = zip(scales, self._bases, strict=True)
        terms = (scale.unsqueeze(-1) * basis for scale, basis in pairs)
        return reduce(torch.add, terms).flatten(-3)

    def stored(self) -> Quantized:
        with torch.no_grad():
            whole, small = self._stored_scales()
        tuned = with_scales(self._format, self._quantized, whole)
        return with_small_scales(self._format, tuned, small) if small else tuned


def _rounded(exact: Tensor, rounded: Tensor) -> Tensor:
    """Rounded, with the gradient of what is not (straight-through)."""
    return exact + (rounded.float() - exact).detach()


class _Student(torch.nn.Module):
    """The model with other weights, and the gradients of its KL from the original."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model = model.model
        self._opened = model
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(f"model.{name}")
        self._names = {
            c.name: [name for p in model.parameters_of(c) for name in names[id(p)]]
            for c in model.anatomy.candidates
        }

    def forward(self, ids: Tensor) -> Tensor:
        return self._opened.task.forward(self.model, ids)

    def backward(self, ids: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Adds the gradients of the KL per token to the leaves behind `weights`."""
        chain = self._opened.chain
        leaves = {
            name: w.detach().requires_grad_(w.requires_grad)
            for name, w in weights.items()
        }
        placed = {n: leaf for name, leaf in leaves.items() for n in self._names[name]}
        size = max(1, LOGIT_BYTES // (4 * ids.shape[1] * int(chain.head.weight.shape[0])))  # type: ignore[index]
        for part in ids.split(size):
            target = chain.full_logits(part).float().softmax(-1)
            with chain.kernels(gradients=True):
                logits = torch.func.functional_call(self, placed, (part,)).float()
            # The KL but for the original's entropy, which has no gradient.
            counted = self._opened.task.targets(part) != UNCOUNTED
            loss = functional.cross_entropy(logits[counted], target[counted])
            (loss * (len(part) / len(ids))).backward()
        moved = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward(
            [weights[name] for name in moved], [leaves[name].grad for name in moved]
        )
