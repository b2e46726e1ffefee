"""GPUs: whether Triton's kernels run on one, how much of its memory is free, and copies from and to it."""

from __future__ import annotations

import importlib.util
from functools import cache

from kl_lens.base.lazy import torch


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether modules called `triton_…` work on this device."""
    return device.type == "cuda" and _has_triton()


def free_memory(device: torch.device) -> int:
    """GPU memory in bytes that this process can still allocate, within its share if it has one."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device) - allocated
    share = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)
    return min(int(free) + reserved, share - allocated)


def elements_at_once(device: torch.device) -> int:
    """How many weights to quantize at a time: few enough to stay in a CPU's cache; on a GPU enough to keep it busy, but
    not so many that a dozen temporary tensors fill a small card."""
    if device.type == "cpu":
        return 1 << 18
    return min(1 << 27, torch.cuda.mem_get_info(device)[1] >> 10)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory; from a GPU through page-locked memory, which torch keeps for the next copy."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # Page-locked, because it does not block.
    copy = tensor.contiguous().to("cpu", non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def constant(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers on the device, without waiting for what it still computes."""
    return values.to(device, non_blocking=True)
