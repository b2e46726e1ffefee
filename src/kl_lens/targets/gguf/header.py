"""Reads a GGUF file's header and refuses files that llama.cpp would abort on.

On some files llama.cpp aborts the whole process, and nothing can catch that: a convolution in F16, an unknown expansion
factor. They are found here first. The tokenizer's long lists are skipped, so this takes milliseconds for any
vocabulary.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens.base.errors import TargetError, one_line, printable
from kl_lens.weights.formats.ggml import gguf_module

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_KEPT_ARRAY = 4096

# Kernels read these as float32 whatever their type says.
_FLOAT32_ONLY = re.compile(r"\.ssm_(conv1d\.(weight|bias)|a|d|dt\.bias)$|norm(\.weight)?$")
_EXPANSION_OF_TWO = ("mamba", "jamba", "granitehybrid")
_ALIGNMENTS = [2**power for power in range(3, 17)]
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_MOST_BLOCKS = 512  # llama.cpp's own limit


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # as numpy and PyTorch write it: rows first
    type: str  # ggml's name: F32, F16, Q8_0, …
    offset: int  # from the beginning of its file
    bytes: int
    path: Path  # its file: one of the parts


@dataclass(frozen=True)
class FileInfo:
    """A GGUF file's metadata (without very long arrays) and the tensors of all its parts."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    paths: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))


class _Damaged(Exception):
    pass


class _Cursor:
    def __init__(self, data: mmap.mmap, whole: bool) -> None:
        self.data, self.whole = data, whole
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise _Damaged("it ends inside its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: int) -> Any:
        return struct.unpack("<" + _CODES[kind], self.take(_SIZES[kind]))[0]

    def text(self) -> str:
        return self.take(self.number(10)).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SIZES:
            raise _Damaged(f"it has a value of unknown type {kind}")
        return self.number(kind)

    def array(self) -> Any:
        kind, count = self.number(4), self.number(10)
        if kind in _SIZES:
            if count > _LONGEST_KEPT_ARRAY and not self.whole:
                self.take(count * _SIZES[kind])
                return f"[{count} values]"
            return list(struct.unpack(f"<{count}{_CODES[kind]}", self.take(count * _SIZES[kind])))
        if kind != _STRING:
            raise _Damaged(f"it has an array of unknown type {kind}")
        if self.whole:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.take(self.number(10))
        return f"[{count} strings]"


def parts_of(path: Path) -> tuple[Path, ...]:
    """All parts of a file, in order, found by their names as in llama.cpp."""
    if not (match := _PART.fullmatch(path.name)):
        return (path,)
    stem, count = match[1], int(match[3])
    return tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def read_header(path: Path, *, whole: bool = False) -> FileInfo:
    """Parses the headers of a file and its other parts; checks that every tensor lies inside its file.

    `whole`: with the tokenizer's long lists, which are otherwise only counted.
    """
    first, *others = [_read_one(part, whole) for part in parts_of(path)]
    tensors = (*first.tensors, *(entry for other in others for entry in other.tensors))
    count = first.metadata.get("split.tensors.count", len(tensors))
    if others and count != len(tensors):
        raise TargetError(
            f"{path}: its parts hold {len(tensors)} tensors, not {count}; export or download them again"
        )
    return FileInfo(first.metadata, tensors, parts_of(path))


def _read_one(path: Path, whole: bool) -> FileInfo:
    if not path.is_file():
        raise TargetError(
            f"{path}: no such file; give a .gguf file that `kl-lens export --target gguf` wrote"
        )
    if path.stat().st_size < 24:
        raise TargetError(f"{path} is not a GGUF file: it is only {path.stat().st_size} bytes long")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise TargetError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not b'GGUF'")
        try:
            return _parse(_Cursor(data, whole), len(data), path)
        except (_Damaged, struct.error, OverflowError, MemoryError) as error:
            reason = printable(one_line(error)) if isinstance(error, _Damaged) else "its header is invalid"
            raise TargetError(f"{path} is damaged: {reason}; export or download it again") from error


def _parse(cursor: _Cursor, size: int, path: Path) -> FileInfo:
    cursor.take(4)
    version = cursor.number(4)
    if version not in (2, 3):
        raise _Damaged(f"it has GGUF version {version}, not 2 or 3")
    tensors, keys = cursor.number(10), cursor.number(10)
    metadata = {}
    for _ in range(keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number(4))
    raw = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if alignment not in _ALIGNMENTS:
        raise _Damaged(f"general.alignment is {str(alignment)[:40]!r}, not a power of two from 8 on")
    start = math.ceil(cursor.at / alignment) * alignment
    placed = tuple(
        TensorEntry(name, shape, kind, start + at, count, path) for name, shape, kind, at, count in raw
    )
    for entry in placed:
        if entry.offset + entry.bytes > size:
            raise _Damaged(
                f"tensor {entry.name} needs bytes up to {entry.offset + entry.bytes} but the file has {size}"
            )
    return FileInfo(metadata, placed, (path,))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    gguf = gguf_module()
    name = cursor.text()
    dimensions = cursor.number(4)
    if dimensions > 4:
        raise _Damaged(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.number(10) for _ in range(dimensions))[::-1]
    try:
        kind = gguf.GGMLQuantizationType(cursor.number(4))
    except ValueError:
        raise _Damaged(f"tensor {name} has a type that gguf does not know") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return name, shape, kind.name, cursor.number(10), math.prod(shape) // block * block_bytes


def check_file(path: Path) -> FileInfo:
    """`read_header`, and raises TargetError for files that llama.cpp would abort on."""
    info = read_header(path)
    if info.architecture == "?":
        raise TargetError(f"{path} names no architecture (general.architecture); export it again")
    for entry in info.tensors:
        if _FLOAT32_ONLY.search(entry.name) and entry.type != "F32":
            raise TargetError(
                f"{path}: tensor {printable(entry.name[:80])} is {entry.type}, but llama.cpp reads it as F32; "
                "export it again"
            )
    if problem := next(_contradictions(info), None):
        raise TargetError(f"{path}: {printable(problem[:240])}; export or download it again")
    return info


def _contradictions(info: FileInfo) -> Iterator[str]:
    """Settings that are impossible or contradict the tensors. On some, llama.cpp aborts, hangs or divides by zero."""
    metadata, architecture = info.metadata, info.architecture

    def setting(name: str) -> Any:
        return metadata.get(f"{architecture}.{name}")

    counts = ("block_count", "embedding_length", "context_length", "rope.dimension_count")
    for name in counts:
        value = setting(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield f"{architecture}.{name} is {str(value)[:40]}, not a positive number"
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        value = setting(f"attention.{name}")
        if value is not None and not (isinstance(value, float) and 0 <= value < 1):
            yield f"{architecture}.attention.{name} is {str(value)[:40]}, not a small positive number"
    blocks = {int(match[1]) for entry in info.tensors if (match := _BLOCK.match(entry.name))}
    count, width, rope = setting("block_count"), setting("embedding_length"), setting("rope.dimension_count")
    if count is not None and (count > _MOST_BLOCKS or max(blocks, default=-1) >= count):
        yield f"{architecture}.block_count is {count}, but its tensors are of {len(blocks)} blocks"
    if rope is not None and rope % 2:
        yield f"{architecture}.rope.dimension_count is {rope}, not an even number"
    inner = setting("ssm.inner_size")
    if architecture in _EXPANSION_OF_TWO and inner is not None and inner != 2 * (width or 0):
        yield f"{architecture} needs an inner size of twice {width}, but it is {inner}"
    embedding = next((entry for entry in info.tensors if entry.name == "token_embd.weight"), None)
    if embedding is not None and width is not None and embedding.shape[1:] != (width,):
        yield f"{architecture}.embedding_length is {width}, but the embedding has the shape {embedding.shape}"
    tokens = re.fullmatch(r"\[(\d+) strings\]", str(metadata.get("tokenizer.ggml.tokens")))
    if embedding is not None and tokens and int(tokens[1]) != embedding.shape[0]:
        yield f"its tokenizer has {tokens[1]} tokens, but the embedding has the shape {embedding.shape}"
