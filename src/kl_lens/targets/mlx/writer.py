"""Writes a safetensors file tensor by tensor; its size is known before any tensor is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kl_lens.base.files import naming

_BYTES = {"F32": 4, "U32": 4, "F16": 2, "U8": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


def file_size(entries: Sequence[Entry]) -> int:
    return len(_header(entries)) + sum(entry.bytes for entry in entries)


def write_file(path: Path, entries: Sequence[Entry], data: Callable[[Entry], npt.NDArray[np.uint8]]) -> None:
    """`data` gives an entry's bytes; it is called once for each, in order."""
    with naming(path), path.open("wb") as file:
        file.write(_header(entries))
        for entry in entries:
            content = data(entry)
            assert content.nbytes == entry.bytes, entry
            file.write(content.data)


def _header(entries: Sequence[Entry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for entry in entries:
        offsets = [at, at := at + entry.bytes]
        described[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text
