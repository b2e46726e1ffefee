"""The safetensors file of an mlx-lm folder: written tensor by tensor, so that its size is known before any tensor is;
read for what one token needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from kl_lens.base.files import naming
from kl_lens.targets.contents import Contents
from kl_lens.targets.mlx.session import MLXSession

PARTS = ("weight", "scales", "biases")  # of a quantized matrix
_EMBEDDINGS, _EXPERTS = ("embeddings", "embed_tokens"), "switch_mlp"
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


def file_contents(file: Path) -> Contents:
    """Lookups and experts by mlx-lm's names; states as a session keeps them."""
    config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
    counts = [config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts, chosen = next(filter(None, counts), 0), config.get("num_experts_per_tok")
    arrays = [
        item for path in sorted(file.parent.glob("model*.safetensors")) for item in load_file(path).items()
    ]
    untied = any(name.startswith("lm_head.") for name, _ in arrays)
    read = 0.0
    for name, array in arrays:
        owner, share = name.rpartition(".")[0], 1.0
        if owner.endswith(_EMBEDDINGS) and untied:
            share = 1 / array.shape[0]
        elif _EXPERTS in owner and chosen and experts:
            share = chosen / experts
        read += share * array.nbytes
    with MLXSession(file.parent) as session:
        session.step(0)
        fixed, growing = session.state_bytes()
    # In float32 here; the file's own types, which a GPU uses, have half of that.
    return Contents(read, fixed // 2, growing / 2)
