"""Writes a safetensors file tensor by tensor, so that its size is known before any tensor is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kl_lens.base.files import naming

_BYTES = {"I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


def file_size(entries: Sequence[Entry], made_for: str) -> int:
    return len(_header(entries, made_for)) + sum(entry.bytes for entry in entries)


def write_file(
    path: Path, entries: Sequence[Entry], made_for: str, data: Callable[[Entry], npt.NDArray[np.uint8]]
) -> None:
    """`made_for`: the header's format, `mlx` or `pt`. `data` gives an entry's bytes; called once for each, in order."""
    with naming(path), path.open("wb") as file:
        file.write(_header(entries, made_for))
        for entry in entries:
            content = data(entry)
            assert content.nbytes == entry.bytes, entry
            file.write(content.data)


def _header(entries: Sequence[Entry], made_for: str) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": made_for}}
    at = 0
    for entry in entries:
        offsets = [at, at := at + entry.bytes]
        described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text
