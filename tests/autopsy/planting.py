"""Changes the values and settings of files that were sound, in place."""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import openvino as ov

from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.openvino.folder import IR_FILE, WEIGHT_FILE

Array = npt.NDArray[Any]
Change = Callable[[Array], Array]


def change(folder: Path, name: str, edit: Change) -> None:
    """Changes the values of a tensor, in its own type."""
    if list(folder.glob("*.gguf")):
        _change_gguf(folder, name, edit)
    else:
        _change_ir(folder, name, edit)


def values(folder: Path, name: str) -> Array:
    arrays = []

    def seen(array: Array) -> Array:
        arrays.append(array.copy())
        return array

    change(folder, name, seen)
    return arrays[0]  # type: ignore[no-any-return]


def swap(folder: Path, one: str, two: str) -> None:
    first = values(folder, one)
    second = values(folder, two)
    change(folder, one, lambda _: second)
    change(folder, two, lambda _: first)


def gguf_bytes(folder: Path, name: str) -> Array:
    """The bytes of a tensor; what is written to them is written to the file."""
    path = next(folder.glob("*.gguf"))
    entry = next(entry for entry in read_header(path).tensors if entry.name == name)
    return np.memmap(path, np.uint8, "r+", entry.offset, (entry.bytes,))


def _change_gguf(folder: Path, name: str, edit: Change) -> None:
    path = next(folder.glob("*.gguf"))
    entry = next(entry for entry in read_header(path).tensors if entry.name == name)
    data = gguf_bytes(folder, name)
    kind = gguf.GGMLQuantizationType[entry.type]
    rows = data.reshape(-1, data.size // max(entry.shape[0], 1))
    new = edit(gguf.dequantize(rows, kind).reshape(entry.shape))
    blocks = gguf.quants.quantize(new.astype(np.float32).reshape(len(rows), -1), kind)
    data[:] = blocks.view(np.uint8).reshape(-1)


def _change_ir(folder: Path, name: str, edit: Change) -> None:
    """Of a weight in F16."""
    text = (folder / IR_FILE).read_text()
    attributes = r'element_type="f16" shape="([^"]*)" offset="(\d+)" size="(\d+)"'
    match = re.search(
        rf'name="{re.escape(name)}" type="Const".*?{attributes}', text, re.S
    )
    assert match is not None
    data = np.memmap(
        folder / WEIGHT_FILE, np.float16, "r+", int(match[2]), (int(match[3]) // 2,)
    )
    data[:] = edit(
        data.astype(np.float32).reshape([int(size) for size in match[1].split(",")])
    ).reshape(-1)


def retyped(folder: Path, name: str, kind: gguf.GGMLQuantizationType) -> None:
    """Stores a tensor in F32 as another type, in its place; what is left of its room is not used."""
    path = next(folder.glob("*.gguf"))
    data = gguf_bytes(folder, name)
    blocks = gguf.quants.quantize(data.view(np.float32).reshape(1, -1), kind).reshape(-1)
    data[: blocks.size] = blocks
    data.flush()
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dimensions = struct.unpack_from("<I", content, at)[0]
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, kind)
    path.write_bytes(content)


def rewritten(
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
) -> None:
    """The GGUF with other metadata and tensors in F16; None leaves one out, a function makes the new value."""
    path = next(folder.glob("*.gguf"))
    old = path.rename(path.with_name("old.gguf"))
    info = read_header(old, whole=True)
    changes = dict(metadata or {})
    writer = gguf.GGUFWriter(path, info.architecture)
    adding = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for name, before in info.metadata.items():
        value = changes.get(name, before)
        value = value(before) if callable(value) else value
        if name != "general.architecture" and value is not None:
            adding.get(type(value), writer.add_array)(name, value)
    for entry in info.tensors:
        new = (tensors or {}).get(entry.name, entry)
        if new is entry:
            data = np.memmap(old, np.uint8, "r", entry.offset, (entry.bytes,)).reshape(
                *entry.shape[:-1], -1
            )
            data = data.view(np.float32) if entry.type == "F32" else data
            writer.add_tensor(
                entry.name, data, raw_dtype=gguf.GGMLQuantizationType[entry.type]
            )
        elif new is not None:
            writer.add_tensor(entry.name, new.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    old.unlink()


def regraphed(folder: Path, edit: Callable[[ov.Model], None]) -> None:
    """The IR after a change of its graph."""
    graph = ov.Core().read_model(folder / IR_FILE)
    edit(graph)
    ov.save_model(graph, folder / "new.xml", compress_to_fp16=False)
    for suffix in (".xml", ".bin"):
        (folder / "new").with_suffix(suffix).rename(
            (folder / IR_FILE).with_suffix(suffix)
        )


def edited(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    """A JSON file after a change."""
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(edit(content) or content))
