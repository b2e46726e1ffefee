"""Documents from files: .txt, .jsonl, .jsonl.zst, .parquet, or a folder of them.

A .txt file is one document. In .jsonl and .parquet every row is one, with its text in the field `text`. Blank rows are
skipped; rows without the field are an error, because they usually mean the wrong file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from kl_lens.base.errors import TextError
from kl_lens.text.documents import Document, checked_document

TEXT_FIELD = "text"
_CHUNK = 1 << 20


def read_path(path: Path) -> Iterator[Document]:
    """The documents of a file, or of every text file in a folder and its subfolders, sorted by path."""
    if path.is_dir():
        yield from _read_folder(path)
        return
    if not path.exists():
        raise TextError(f"{path}: no such file or folder: check the path")
    reader = _reader_for(path)
    if reader is None:
        raise TextError(f"{path}: not a text file that can be read: use {supported_suffixes()}")
    try:
        empty = path.stat().st_size == 0
        any_text = False
        for document in () if empty else reader(path):
            any_text = True
            yield document
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not any_text:
        raise TextError(f"{path}: {'empty' if empty else 'holds only blank text'}: expected some text")


def supported_suffixes() -> str:
    return ", ".join(_READERS)


def _reader_for(path: Path) -> Callable[[Path], Iterator[Document]] | None:
    name = path.name.lower()
    return next((reader for suffix, reader in _READERS.items() if name.endswith(suffix)), None)


def _read_folder(folder: Path) -> Iterator[Document]:
    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and _reader_for(p) and not is_hidden(p)]
    if not paths:
        raise TextError(f"{folder}: no text files in this folder: expected {supported_suffixes()}")
    for path in paths:
        yield from read_path(path)


def _read_txt(path: Path) -> Iterator[Document]:
    text = _decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path), 0)
    document = checked_document(str(path), text)
    if document:
        yield document


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        yield from _rows_of_json_lines(path, file)


def _read_jsonl_zst(path: Path) -> Iterator[Document]:
    yield from _rows_of_json_lines(path, lines_of(_decompressed(path)))


def _rows_of_json_lines(path: Path, lines: Iterator[bytes]) -> Iterator[Document]:
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
        document = checked_document(where, row[TEXT_FIELD])
        if document:
            yield document


def _read_parquet(path: Path) -> Iterator[Document]:
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if TEXT_FIELD not in columns:
                raise TextError(
                    f"{path}: no column `{TEXT_FIELD}`: its columns are {', '.join(columns) or 'none'}"
                )
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[TEXT_FIELD]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path}, row {row}"
                    if not isinstance(value, str):
                        raise TextError(
                            f"{where}: column `{TEXT_FIELD}` holds {value!r:.40}: expected a string"
                        )
                    document = checked_document(where, value)
                    if document:
                        yield document
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: column `{TEXT_FIELD}` is not UTF-8 (byte {error.start} of a row)") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TextError(f"{path}: not a readable Parquet file ({reason}): is it complete?") from None


def _decode(raw: bytes, where: str, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise TextError(
            f"{where}: not UTF-8 (byte 0x{byte:02x} at offset {offset + error.start} of the file): "
            "convert it first, for example with iconv"
        ) from None


def _decompressed(path: Path) -> Iterator[bytes]:
    """Decompresses frame by frame; zstandard's own stream reader accepts truncated files."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    frame_is_open = False
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                while data:
                    yield frame.decompress(data)
                    data = frame.unused_data
                    frame_is_open = not frame.eof
                    if frame.eof:
                        frame = zstandard.ZstdDecompressor().decompressobj()
    except zstandard.ZstdError as error:
        raise TextError(f"{path}: damaged zstd data ({error}): fetch the file again") from None
    if frame_is_open:
        raise TextError(f"{path}: the zstd data is cut off before its end: fetch the file again")


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest


# In the order they are tried and listed in messages.
_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
}
