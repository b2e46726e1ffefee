"""Muon for the weight matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.1
MOMENTUM = 0.95


def orthogonalize(matrices: Tensor) -> Tensor:
    """Pulls the singular values of each [k, r, c] matrix towards 1 by five Newton-Schulz steps."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # the quintic's coefficients trade exactness for speed near zero
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, then orthogonalized updates; matrices of one shape are handled as one batch."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        self.groups = [
            (group, torch.zeros_like(torch.stack(group))) for group in by_shape.values()
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for group, momentum in self.groups:
            gradient = torch.stack([p.grad for p in group])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalize(gradient.lerp(momentum, MOMENTUM))
            # Matches the size of an AdamW update, so that both share one learning-rate scale.
            update = update.float() * (0.2 * max(update.shape[-2:]) ** 0.5)
            torch._foreach_mul_(group, 1 - learning_rate * WEIGHT_DECAY)
            torch._foreach_add_(group, list(update.unbind()), alpha=-learning_rate)


class Optimizer:
    """Both optimizers behind one ``step(scale)``; scale is the schedule's value in [0, 1]."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float) -> None:
        matrices = []
        others = []
        for name, parameter in model.named_parameters():
            is_matrix = (
                parameter.dim() == 2
                and name.replace(".0.", ".").endswith("_proj.weight")
                and "dt_proj" not in name
            )
            (matrices if is_matrix and muon_rate > 0 else others).append(parameter)
        self.parameters = matrices + others
        self.muon_rate = muon_rate
        self.adam_rate = adam_rate
        self.muon = Muon(matrices) if matrices else None
        decayed = [p for p in others if p.dim() == 2 and p.shape[1] >= 256]
        plain = [p for p in others if not (p.dim() == 2 and p.shape[1] >= 256)]
        self.adam = torch.optim.AdamW(
            [
                {
                    "params": decayed,
                    "weight_decay": WEIGHT_DECAY if not matrices else 0.01,
                },
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=adam_rate,
            betas=(0.9, 0.95),
            fused=others[0].is_cuda,
        )

    def step(self, scale: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        if self.muon is not None:
            self.muon.step(self.muon_rate * scale)
        for parameter in self.parameters:
            parameter.grad = None
