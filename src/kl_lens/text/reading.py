"""Documents from files: .txt, .jsonl, .jsonl.zst, .parquet, or a folder of them.

A .txt file is one document. In .jsonl and .parquet every row is one, with its text in the field `text`. Blank rows are
skipped; rows without the field are an error, because they usually mean the wrong file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from kl_lens.base.errors import TextError
from kl_lens.text.documents import Document, documents_of

TEXT_FIELD = "text"
Texts = Iterator[tuple[str, str]]  # where it is, and the text


def read_path(path: Path) -> list[Document]:
    """The documents of a file, or of every text file in a folder and its subfolders, sorted by path."""
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise TextError(f"{path}: no such file or folder: check the path")
    suffix = _suffix(path)
    if suffix is None:
        raise TextError(f"{path}: not a text file that can be read: use {SUFFIXES}")
    try:
        empty = path.stat().st_size == 0
        documents = [] if empty else [*documents_of(_READERS[suffix](path))]
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not documents:
        raise TextError(f"{path}: {'empty' if empty else 'holds only blank text'}: expected some text")
    return documents


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in _READERS if path.name.lower().endswith(suffix)), None)


def _read_folder(folder: Path) -> list[Document]:
    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and _suffix(p) and not is_hidden(p)]
    if not paths:
        raise TextError(f"{folder}: no text files in this folder: expected {SUFFIXES}")
    return [document for path in paths for document in read_path(path)]


def _read_txt(path: Path) -> Texts:
    yield str(path), _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))


def _read_jsonl(path: Path) -> Texts:
    with path.open("rb") as file:
        yield from _rows_of_json(path, file)


def _read_jsonl_zst(path: Path) -> Texts:
    """Frame by frame; zstandard's own stream reader accepts truncated files."""
    data, content = path.read_bytes(), io.BytesIO()
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            content.write(frame.decompress(data))
        except zstandard.ZstdError as error:
            raise TextError(f"{path}: damaged zstd data ({error}): fetch the file again") from None
        if not frame.eof:
            raise TextError(f"{path}: the zstd data is cut off before its end: fetch the file again")
        data = frame.unused_data
    content.seek(0)
    yield from _rows_of_json(path, content)


def _rows_of_json(path: Path, lines: Iterable[bytes]) -> Texts:
    offset = 0
    for number, raw in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        line = _decode(raw, where, offset).removeprefix("\ufeff")
        offset += len(raw)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TextError(
                f'{where}: not valid JSON ({error}): expected one object per line, {{"{TEXT_FIELD}": …}}'
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get(TEXT_FIELD), str):
            fields = f"fields {', '.join(row) or 'none'}" if isinstance(row, dict) else type(row).__name__
            raise TextError(f"{where}: no field `{TEXT_FIELD}` with a string in it (found: {fields})")
        yield where, row[TEXT_FIELD]


def _read_parquet(path: Path) -> Texts:
    try:
        columns = pq.read_schema(path).names
        if TEXT_FIELD not in columns:
            raise TextError(
                f"{path}: no column `{TEXT_FIELD}`: its columns are {', '.join(columns) or 'none'}"
            )
        rows = pq.read_table(path, columns=[TEXT_FIELD]).column(0).to_pylist()
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: column `{TEXT_FIELD}` is not UTF-8 (byte {error.start} of a row)") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TextError(f"{path}: not a readable Parquet file ({reason}): is it complete?") from None
    for number, value in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        if not isinstance(value, str):
            raise TextError(f"{where}: column `{TEXT_FIELD}` holds {value!r:.40}: expected a string")
        yield where, value


def _decode(raw: bytes, where: str, offset: int = 0) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise TextError(
            f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x} at offset {offset + error.start} of the file): "
            "convert it first, for example with iconv"
        ) from None


# In the order they are tried and listed in messages.
_READERS = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
}
SUFFIXES = ", ".join(_READERS)
