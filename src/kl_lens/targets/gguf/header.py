"""Reads what a GGUF file says about itself and where its tensors are; clear errors for broken files.

gguf's own reader makes an array of every token, which takes seconds for a large vocabulary, and loops without end on
some damaged lengths. Here the tokenizer's long lists are only counted: milliseconds for any vocabulary.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kl_lens.base.errors import TargetError, one_line, printable
from kl_lens.base.files import damage
from kl_lens.targets.abilities import Contents
from kl_lens.weights.formats.ggml_types import ggml_types

# Number types of metadata by their code, as `struct` spells them.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_LONGEST_KEPT_ARRAY = 4096
_MOST_TEXTS = 1 << 22  # of one list; vocabularies and their merges have a tenth
_SMALLEST = {"tensor": 24, "key": 12}  # bytes that each takes in a header
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # as numpy and PyTorch write it: rows first
    type: str  # ggml's name: F32, F16, Q8_0, …
    offset: int  # from the beginning of its file
    bytes: int
    path: Path  # its file: one of the parts

    @property
    def format(self) -> str:
        """Its type as we call it: fp32, q8_0, …"""
        return {"F32": "fp32", "F16": "fp16"}.get(self.type, self.type.lower())


@dataclass(frozen=True)
class FileInfo:
    """A GGUF file's metadata (without very long arrays) and the tensors of all its parts."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    paths: tuple[Path, ...]
    # Key → codes of its type, and of the type within a list.
    kinds: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))

    @property
    def short_context(self) -> int:
        """Where texts have rope factors of their own by length (longrope): the longest with those for short ones, which
        llama.cpp takes if its whole context is no longer. 0: everywhere the same."""
        if self.metadata.get(f"{self.architecture}.rope.scaling.type") != "longrope":
            return 0
        return self._number("rope.scaling.original_context_length")

    def contents(self) -> Contents:
        """What one token reads, from llama.cpp's tensor names. States are F32; keys and values are F16 by default."""
        keys = (
            "expert_count",
            "expert_used_count",
            "ssm.inner_size",
            "ssm.state_size",
            "embedding_length",
        )
        experts, chosen, inner, state, width = map(self._number, keys)
        shapes = {entry.name: entry.shape for entry in self.tensors}
        read = 0.0
        untied = "output.weight" in shapes
        share = (chosen or experts) / experts if experts else 1
        for entry in self.tensors:
            if entry.name == "token_embd.weight" and untied:
                read += entry.bytes / entry.shape[0]
            else:
                read += entry.bytes * (share if "_exps." in entry.name else 1)
        fixed = 0
        growing = 0
        for name, shape in shapes.items():
            if name.endswith(".ssm_conv1d.weight"):
                fixed += 4 * (inner * state + shape[0] * (shape[-1] - 1))
            elif re.search(r"\.attn_[kv]\.weight$", name):
                growing += 2 * shape[0]
            elif name.endswith(".attn_qkv.weight"):
                growing += 2 * (shape[0] - width)
        return Contents(read, fixed, growing)

    def _number(self, key: str) -> int:
        """Of the architecture's settings; 0 if it is none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) else 0


def parts_of(path: Path) -> tuple[Path, ...]:
    """All parts of a file, in order, found by their names as in llama.cpp."""
    match = _PART.fullmatch(path.name)
    if match is None or not int(match[3]):
        return (path,)
    stem = match[1]
    count = int(match[3])
    return tuple(
        path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )


def read_header(path: Path, *, whole: bool = False, exact: bool = False) -> FileInfo:
    """The headers of a file and its other parts; checks that every tensor lies inside its file.

    `whole`: with the tokenizer's long lists, which are otherwise only counted. `exact`: texts keep bytes that
    are not UTF-8 (surrogateescape).
    """
    paths = parts_of(path)
    if missing := [part for part in paths[1:] if not part.is_file() and path.is_file()]:
        raise TargetError(
            f"{path} is one of {len(paths)} parts, and {missing[0].name} is not beside it; download all parts"
        )
    names = set[str]()
    first, *further = [_read_part(part, _Reading(whole, exact, names)) for part in paths]
    tensors = (*first.tensors, *(entry for part in further for entry in part.tensors))
    count = first.metadata.get("split.tensors.count", len(tensors))
    if further and count != len(tensors):
        raise TargetError(
            f"{path}: its parts hold {len(tensors)} tensors, not {count}; export or download again"
        )
    parts = first.metadata.get("split.count") or 1
    if parts != len(paths) and not further:
        raise TargetError(
            f"{path} is one of {parts} parts; give all of them their names back: NAME-00001-of-{parts:05}.gguf"
        )
    return FileInfo(first.metadata, tensors, paths, first.kinds)


def _read_part(path: Path, reading: _Reading) -> FileInfo:
    if not path.is_file():
        raise TargetError(
            f"{path}: no such file; give a .gguf file that `kl-lens export` wrote"
        )
    if path.stat().st_size < 24:
        raise TargetError(
            f"{path} {damage(path)} (not a GGUF file: only {path.stat().st_size} bytes long)"
        )
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        if data[:4] != b"GGUF":
            raise TargetError(
                f"{path} {damage(path)} (not a GGUF file: it begins with {bytes(data[:4])!r})"
            )
        try:
            return _Reader(data, reading).read(path)
        except (_Damaged, struct.error, OverflowError, MemoryError) as error:
            reason = (
                printable(one_line(error))
                if isinstance(error, _Damaged)
                else "its header is invalid"
            )
            raise TargetError(
                f"{path} is damaged: {reason}; export or download it again"
            ) from error


class _Damaged(Exception):
    pass


@dataclass(frozen=True)
class _Reading:
    whole: bool
    exact: bool
    names: set[str]  # of the tensors so far, of earlier parts too


class _Reader:
    """Reads a header from its beginning to its end."""

    def __init__(self, data: mmap.mmap, reading: _Reading) -> None:
        self.data = data
        self.reading = reading
        self.at = 4

    def read(self, path: Path) -> FileInfo:
        if (version := self.number("I")) not in (2, 3):
            raise _Damaged(f"it has GGUF version {version}, not 2 or 3")
        tensors = self.count("tensor")
        keys = self.count("key")
        metadata = {}
        kinds = {}
        for _ in range(keys):
            key = self.text()
            if key in metadata:
                raise _Damaged(f"its key {key} comes twice")
            kind = self.number("I")
            inner = struct.unpack("<I", self.data[self.at : self.at + 4])[0]
            kinds[key] = (kind, inner if kind == _ARRAY else None)
            metadata[key] = self.value(kind)
        entries = [self.entry(path) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if alignment not in [2**power for power in range(3, 17)]:
            raise _Damaged(
                f"general.alignment is {str(alignment)[:40]!r}, not a power of two from 8 on"
            )
        start = math.ceil(self.at / alignment) * alignment
        self.check_places(start, entries, alignment)
        placed = (replace(entry, offset=start + entry.offset) for entry in entries)
        return FileInfo(metadata, tuple(placed), (path,), kinds)

    def check_places(
        self, start: int, entries: list[TensorEntry], alignment: int
    ) -> None:
        """Raises if a tensor lies outside the file, between alignments or on another one."""
        size = len(self.data) - start
        end = 0
        for entry in sorted(entries, key=lambda entry: (entry.offset, entry.bytes)):
            if entry.offset + entry.bytes > size:
                needed = start + entry.offset + entry.bytes
                raise _Damaged(
                    f"tensor {entry.name} needs bytes up to {needed} but the file has {len(self.data)}"
                )
            if entry.offset % alignment or entry.offset < end:
                raise _Damaged(
                    f"tensor {entry.name} begins at byte {start + entry.offset}, inside another or unaligned"
                )
            end = entry.offset + entry.bytes

    def count(self, label: str) -> int:
        """How many tensors or keys the header announces."""
        count = int(self.number("Q"))
        if count > len(self.data) // _SMALLEST[label]:
            raise _Damaged(f"it announces {count} {label}s, for which it is too short")
        return count

    def take(self, count: int) -> bytes:
        left = len(self.data) - self.at
        if count > left:
            raise _Damaged(
                f"it ends inside its header: {count} bytes are announced at byte {self.at}, {left} are left"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        errors = "surrogateescape" if self.reading.exact else "replace"
        return self.take(self.number("Q")).decode(errors=errors)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise _Damaged(f"it has a value of unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def array(self, kind: int, count: int) -> Any:
        if kind in _NUMBERS:
            data = self.take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
            is_listed = self.reading.whole or count <= _LONGEST_KEPT_ARRAY
            return (
                list(struct.unpack(f"<{count}{_NUMBERS[kind]}", data))
                if is_listed
                else f"[{count} values]"
            )
        if kind != _STRING:
            raise _Damaged(f"it has an array of unknown type {kind}")
        if count > _MOST_TEXTS:
            raise _Damaged(f"it announces a list of {count} texts")
        if self.reading.whole:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.take(self.number("Q"))
        return f"[{count} strings]"

    def entry(self, path: Path) -> TensorEntry:
        """A tensor; its offset counts from the first one."""
        name = self.text()
        if name in self.reading.names:
            raise _Damaged(f"two tensors are called {name!r}")
        self.reading.names.add(name)
        if (dimensions := self.number("I")) > 4:
            raise _Damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        number = self.number("I")
        kind = next((t for t in ggml_types().values() if t.number == number), None)
        if kind is None:
            raise _Damaged(f"tensor {name} has a type that gguf does not know")
        if shape and shape[-1] % kind.block:
            raise _Damaged(
                f"tensor {name} has {shape[-1]} columns, which blocks of {kind.block} do not divide ({kind.name})"
            )
        size = math.prod(shape) // kind.block * kind.bytes
        return TensorEntry(name, shape, kind.name, self.number("Q"), size, path)
