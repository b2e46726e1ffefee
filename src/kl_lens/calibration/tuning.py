"""Tunes a finished plan on text: the stored weights move so that the KL from the original falls.

Gradients go through the dequantized weights. Scales are multiplied, rounded to FP16 in every step as the file stores
them; codes are rounded in every step (both straight-through).
The size of the file does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from kl_lens.checkpoints import LoadedModel
from kl_lens.formats import Quantized
from kl_lens.formats.parts import codes_of, scales_of, with_codes, with_scales
from kl_lens.recipes import Recipe

LOGIT_BYTES = 1 << 30  # of one forward and backward pass


@dataclass(frozen=True)
class TuningRates:
    """How far Adam moves in a step: scales by this share, codes by this part of the distance between two."""

    scales: float = 2e-3
    codes: float = 0.0  # 0: codes stay
    epochs: int = 2
    batch: int = 8  # windows per step
    warm_up: float = 0.1  # share of the steps


def tuned(
    model: LoadedModel,
    recipes: Mapping[str, Recipe],
    ids: torch.Tensor,
    rates: TuningRates | None = None,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> dict[str, Quantized]:
    """Component → its tuned form, for those of the plan that have something to tune.

    Args:
        recipes: of the plan.
        ids: (windows, length).
        progress: called with (steps done, steps).
    """
    model.require_memory("tuning")
    rates = rates or TuningRates()
    parts = {name: _Tunable(model, name, recipe, rates) for name, recipe in recipes.items()}
    parts = {name: part for name, part in parts.items() if part.parameters}
    fixed = {
        name: model.weights.values(name, recipe) for name, recipe in recipes.items() if name not in parts
    }
    student = _Student(model)
    groups = [
        {"params": [p for part in parts.values() for p in part.parameters[kind]], "lr": rate, "rate": rate}
        for kind, rate in (("scales", rates.scales), ("codes", rates.codes))
        if rate
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    per_epoch = max(1, len(ids) // rates.batch)
    steps = rates.epochs * per_epoch
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(step))
        share = min(1.0, (step + 1) / (rates.warm_up * steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * share * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        first = step % per_epoch * rates.batch
        batch = ids[order[first : first + rates.batch]].to(model.chain.device)
        optimizer.zero_grad()
        student.backward(batch, {**fixed, **{name: part.values() for name, part in parts.items()}})
        optimizer.step()
        progress(step + 1, steps)
    return {name: part.stored() for name, part in parts.items()}


class _Student(torch.nn.Module):
    """The model with other weights, and the gradients of its KL from the original."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model = model.model
        self._opened = model
        self._names = {
            name: [n for n, p in model.model.named_parameters(remove_duplicate=False) if p in own]
            for name in (c.name for c in model.anatomy.candidates)
            for own in [_Identical(model.parameters_of(model.anatomy.component(name)))]
        }

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._opened.task.forward(self.model, ids)

    def backward(self, ids: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> None:
        """Adds the gradients of the KL per token to the leaves behind `weights`."""
        chain, leaves = (
            self._opened.chain,
            {n: w.detach().requires_grad_(w.requires_grad) for n, w in weights.items()},
        )
        placed = {f"model.{n}": leaf for name, leaf in leaves.items() for n in self._names[name]}
        size = max(1, LOGIT_BYTES // (4 * ids.shape[1] * int(chain.head.weight.shape[0])))  # type: ignore[index]
        for part in ids.split(size):
            target = chain.full_logits(part).float().softmax(-1)
            with chain.kernels():
                logits = torch.func.functional_call(self, placed, (part,)).float()
            # The KL but for the original's entropy, which has no gradient.
            loss = functional.cross_entropy(logits.flatten(0, -2), target.flatten(0, -2))
            (loss * (len(part) / len(ids))).backward()
        moved = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward([weights[n] for n in moved], [leaves[n].grad for n in moved])


class _Identical:
    """Membership by identity: tensors compare by value."""

    def __init__(self, items: list[torch.nn.Parameter]) -> None:
        self._ids = {id(item) for item in items}

    def __contains__(self, item: object) -> bool:
        return id(item) in self._ids


class _Tunable:
    """A stored weight as a function of what can be tuned: Σ scale · basis, with the codes in the first basis."""

    def __init__(self, model: LoadedModel, component: str, recipe: Recipe, rates: TuningRates) -> None:
        self._format, self._stored = recipe.grid, model.weights.quantized(component, recipe)
        self._scales = [scale.float() for scale in scales_of(self._format, self._stored)]
        self._bases = [self._basis(self._stored, index) for index in range(len(self._scales))]
        self.parameters: dict[str, list[torch.Tensor]] = {}
        if not self._scales:
            return
        self._factors = [torch.ones_like(scale, requires_grad=True) for scale in self._scales]
        self.parameters["scales"] = list(self._factors)
        self._codes = codes_of(self._format, self._stored) if rates.codes else None
        self.parameters["codes"] = []
        if self._codes is not None:
            ones = with_codes(
                self._format, self._stored, torch.ones_like(self._codes.values) + self._codes.zero
            )
            self._unit = self._basis(ones, 0).flatten(-2)  # of a code, at scale 1
            self._place = self._codes.values.clone().requires_grad_()
            self.parameters["codes"] = [self._place]

    def _basis(self, quantized: Quantized, index: int) -> torch.Tensor:
        """The values with one scale at 1 and the others at 0, (…, rows, blocks, columns of a block)."""
        scales = [torch.full_like(scale, float(i == index)) for i, scale in enumerate(self._scales)]
        values = self._format.dequantize(with_scales(self._format, quantized, scales))
        return values.unflatten(-1, (self._scales[0].shape[-1], -1))

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.repeat_interleave(self._stored.shape[-1] // scale.shape[-1], -1)

    def _rounded(self) -> torch.Tensor:
        assert self._codes is not None
        low, high = (
            torch.as_tensor(edge, device=self._place.device)
            for edge in (self._codes.lowest, self._codes.highest)
        )
        return torch.minimum(torch.maximum(self._place.detach().round(), low), high)

    def values(self) -> torch.Tensor:
        """The float32 weight, with gradients."""
        bases = list(self._bases)
        if self._codes is not None:
            whole = self._place + (self._rounded() - self._place).detach()
            bases[0] = (whole * self._unit).unflatten(-1, bases[0].shape[-2:])
        total: torch.Tensor | None = None
        for scale, factor, basis in zip(self._scales, self._factors, bases, strict=True):
            exact = scale * factor
            term = (exact + (exact.half().float() - exact).detach()).unsqueeze(-1) * basis
            total = term if total is None else total + term
        assert total is not None
        return total.flatten(-2)

    def stored(self) -> Quantized:
        made = self._stored
        if self._codes is not None:
            made = with_codes(self._format, made, self._rounded() + self._codes.zero)
        scales = [scale * factor.detach() for scale, factor in zip(self._scales, self._factors, strict=True)]
        return with_scales(self._format, made, scales)
