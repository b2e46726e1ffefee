"""Digests of large arrays: of the digests of pieces, which several threads compute. Processors have instructions for
SHA-256."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.accelerators import on_host

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 22  # bytes


def bytes_digest(*parts: npt.NDArray[Any], about: str = "") -> str:
    """Of the arrays' bytes, and of `about`."""
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    pieces = [part[first : first + _PIECE] for part in flat for first in range(0, len(part), _PIECE)]
    total = hashlib.blake2b(about.encode(), digest_size=16)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # starts no more threads than there are pieces
        for digest in pool.map(_digest, pieces) if len(pieces) > 2 else map(_digest, pieces):
            total.update(digest)
    return total.hexdigest()


def tensor_digest(*parts: torch.Tensor, about: str = "") -> str:
    import torch

    bytes_of = (on_host(part).contiguous().reshape(-1).view(torch.uint8).numpy() for part in parts)
    return bytes_digest(*bytes_of, about=about)


def _digest(piece: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(piece.data).digest()
