"""Stores states in device memory first, then in the host's (for a GPU), then in a file.

The file has no name, so it disappears with the process even after a crash.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kl_lens.base.environment import available_memory
from kl_lens.base.errors import RunError, one_line
from kl_lens.model import States


@dataclass(frozen=True)
class _OnDisk:
    """Where a tensor is in the file."""

    at: int
    shape: torch.Size
    dtype: torch.dtype
    size: int


def bytes_of(states: States) -> int:
    leaves = pytree.tree_leaves((states.hidden, dict(states.carried)))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


class StateRoom:
    """States by key; `take` returns them on the device they came from.

    Example:
        >>> with closing(StateRoom(10**9, folder)) as room:
        ...     room.put("a", states)
        ...     states = room.take("a")
    """

    def __init__(self, memory: int, folder: Path | None, host: int = 0) -> None:
        """`memory`: bytes on the device. `host`: bytes in the host's memory, for a GPU. `folder`: for the file."""
        self._left, self._host_left, self._folder = memory, host, folder
        self._kept: dict[Hashable, tuple[list[Any], Any, torch.device]] = {}
        self._file: Any = None
        self._free: dict[int, list[int]] = {}  # size → free offsets in the file
        self._end = 0

    def close(self) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    @property
    def spilled(self) -> int:
        """Size of the file."""
        return self._end

    def put(self, key: Hashable, states: States) -> None:
        leaves, structure = pytree.tree_flatten((states.hidden, dict(states.carried)))
        self._kept[key] = ([self._put(leaf) for leaf in leaves], structure, states.hidden.device)

    def take(self, key: Hashable) -> States:
        """Removes and returns the states."""
        leaves, structure, device = self._kept.pop(key)
        hidden, carried = pytree.tree_unflatten([self._take(leaf, device) for leaf in leaves], structure)
        return States(hidden, carried)

    def _put(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.nbytes <= self._left:
            self._left -= leaf.nbytes
            # A view would keep its whole storage alive.
            return leaf if leaf.untyped_storage().nbytes() == leaf.nbytes else leaf.clone()
        if leaf.device.type != "cpu" and leaf.nbytes <= self._host_left:
            self._host_left -= leaf.nbytes
            return leaf.cpu()
        return self._written(leaf)

    def _take(self, leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, _OnDisk):
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
            self._file.seek(leaf.at)
            self._file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._free.setdefault(leaf.size, []).append(leaf.at)
            return tensor.to(device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device == device:
            self._left += leaf.nbytes
            return leaf
        self._host_left += leaf.nbytes
        return leaf.to(device)

    def _written(self, leaf: torch.Tensor) -> _OnDisk:
        data = leaf.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        empty = self._free.get(len(data))
        at = empty.pop() if empty else self._end
        self._end = max(self._end, at + len(data))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".states-")  # noqa: SIM115
            self._file.seek(at)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"{self._folder or tempfile.gettempdir()}: {self._end / 1e9:.1f} GB of states cannot be kept there "
                f"({one_line(error)}); free some space, or raise --memory-budget; finished measurements are kept"
            ) from error
        return _OnDisk(at, leaf.shape, leaf.dtype, len(data))


def room_beside(device: torch.device, folder: Path | None) -> tuple[int, int]:
    """Bytes for states in host memory and on disk: half of what is free in each."""
    host = available_memory() // 2 if device.type != "cpu" else 0
    return host, shutil.disk_usage(folder or tempfile.gettempdir()).free // 2
