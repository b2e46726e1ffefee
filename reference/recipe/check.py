"""Proves the fast scans against the plain recurrence, values and gradients, before any training."""

from __future__ import annotations

import torch
from scan import chunked_scan, plain_selective_scan, selective_scan
from torch import Tensor


def relative_error(value: Tensor, expected: Tensor) -> float:
    error = (value.double() - expected.double()).norm() / expected.double().norm()
    return float(error)


def check_scans(device: str, batch: int = 3, length: int = 200) -> dict[str, float]:
    """The largest relative error of each scan against float64-accurate references; fails above 1e-4."""
    generator = torch.Generator()
    generator.seed()  # fresh inputs each time

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    x = random(batch, length, 64)
    b = random(batch, length, 16)
    c = random(batch, length, 16)
    dt = (random(batch, length, 64).detach() - 2).exp().requires_grad_()
    a = (-random(64, 16).detach().exp()).requires_grad_()
    weight = random(batch, length, 64).detach()
    mamba = _compare([x, dt, a, b, c], weight, selective_scan, plain_selective_scan)

    heads = random(batch, length, 4, 16)
    head_dt = (random(batch, length, 4).detach() - 2).exp().requires_grad_()
    head_a = (-random(4).detach().exp()).requires_grad_()

    def chunked(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return chunked_scan(x, dt, a, b, c, chunk=64).flatten(-2)

    def plain(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        every_channel = a.repeat_interleave(16)[:, None].expand(-1, b.shape[-1])
        return plain_selective_scan(
            x.flatten(-2), dt.repeat_interleave(16, -1), every_channel, b, c
        )

    mamba2 = _compare([heads, head_dt, head_a, b, c], weight, chunked, plain)
    errors = {"selective scan": mamba, "chunked scan": mamba2}
    for name, error in errors.items():
        if not error < 1e-4:
            raise SystemExit(
                f"{name}: relative error {error:.2e} against the plain recurrence on {device}"
            )
    return errors


def _compare(inputs: list[Tensor], weight: Tensor, fast, plain) -> float:
    """Largest relative error over the output and every input's gradient."""
    results = []
    for function in (fast, plain):
        y = function(*inputs)
        gradients = torch.autograd.grad((y * weight).sum(), inputs)
        results.append([y.detach(), *gradients])
    return max(relative_error(f, p) for f, p in zip(*results, strict=True))
