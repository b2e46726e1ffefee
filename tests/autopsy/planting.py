"""Plants faults in files that were sound."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kl_lens.targets.gguf.header import read_header

Bytes = npt.NDArray[np.uint8]


def copied(source: Path, folder: Path) -> Path:
    """A bare copy: without the record beside it, nothing knows where it comes from."""
    return Path(shutil.copy(source, folder / source.name))


def stored(path: Path, name: str) -> Bytes:
    """The bytes of a tensor; what is written to them is written to the file."""
    entry = next(entry for entry in read_header(path).tensors if entry.name == name)
    return np.memmap(path, np.uint8, "r+", entry.offset, (entry.bytes,))


def scale(path: Path, name: str, factor: float) -> None:
    """Multiplies the scales of a tensor in Q8_0 or Q4_0: the first two bytes of each block."""
    entry = next(entry for entry in read_header(path).tensors if entry.name == name)
    blocks = stored(path, name).reshape(-1, {"Q8_0": 34, "Q4_0": 18}[entry.type])
    halves = blocks[:, :2].copy().view(np.float16)
    blocks[:, :2] = (halves.astype(np.float32) * factor).astype(np.float16).view(np.uint8)


def change(path: Path, name: str, dtype: Any, how: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> None:
    """Changes the values of a tensor in F16 or F32."""
    data = stored(path, name)
    data[:] = np.ascontiguousarray(how(data.view(dtype).copy()).astype(dtype)).view(np.uint8)


def swap(path: Path, one: str, two: str) -> None:
    first, second = stored(path, one), stored(path, two)
    kept = first.copy()
    first[:], second[:] = second, kept


def set_number(path: Path, key: str, value: float) -> None:
    """Overwrites a float32 of the metadata."""
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key)
    assert struct.unpack_from("<I", content, at)[0] == gguf.GGUFValueType.FLOAT32
    struct.pack_into("<f", content, at + 4, value)
    path.write_bytes(content)


def retyped(path: Path, name: str, kind: gguf.GGMLQuantizationType) -> None:
    """Stores a tensor in F32 as another type, in its place; what is left of its room is not used."""
    data = stored(path, name)
    blocks = gguf.quants.quantize(data.view(np.float32).reshape(1, -1), kind).reshape(-1)
    data[: blocks.size] = blocks
    data.flush()
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dimensions = struct.unpack_from("<I", content, at)[0]
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, kind)
    path.write_bytes(content)


def rewritten(
    source: Path,
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[npt.NDArray[Any], gguf.GGMLQuantizationType] | None] | None = None,
) -> Path:
    """The file with other metadata and tensors; None leaves a tensor out."""
    reader, path = gguf.GGUFReader(source), folder / source.name
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = (metadata or {}).get(name, field.contents())
        kinds = [gguf.GGUFValueType(kind) for kind in field.types]
        writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        data, kind = np.asarray(tensor.data), tensor.tensor_type
        if (tensors or {}).get(tensor.name, ()) is None:
            continue
        if given := (tensors or {}).get(tensor.name):
            data, kind = given
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
