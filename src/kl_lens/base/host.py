"""Copies between a GPU and the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory; from a GPU through page-locked memory, which torch keeps for the next copy."""
    import torch

    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = tensor.contiguous().to("cpu", non_blocking=True)  # page-locked, because it does not block
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def constant(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers on the device, without waiting for what it still computes."""
    return values.to(device, non_blocking=True)
