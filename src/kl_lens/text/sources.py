"""Text by name, as the command line gives it, and the documents in it.

    wikitext2, wikitext2:test     the shipped copy
    notes.txt, rows.jsonl, texts/ the user's own files and folders; rows may be chats

The known name wins over a file of the same name; write `./wikitext2` for the file.

A document is the unit that calibration and evaluation must never share: a Wikipedia article, a row of a JSON, JSONL or
Parquet file, a whole text file. It is known by the hash of its text, so that a copied file is the same document.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kl_lens.base.errors import TextError, one_line
from kl_lens.base.files import LFS_POINTER, damage, reference_path
from kl_lens.text.chats import Chat, content_of, templated, with_role_names

PARAGRAPH_BREAK = "\n\n"
# Of a longer text only the beginning is read, on every machine the same: windows are drawn from the tokens of the whole
# text, and memory and time shall not depend on a file's size.
MOST_CHARACTERS = 16_000_000


@dataclass(frozen=True)
class Document:
    name: str  # where it comes from, for messages: "wikitext2:test, article 3 (Du Fu)", "notes.jsonl, line 7"
    text: str
    chat: Chat = ()  # what `text` was made from

    @cached_property
    def sha256(self) -> str:
        """Hash of the stripped text: a trailing newline makes no new document. Of a chat with role names, so that one
        chat is the same document with every template."""
        text = with_role_names(self.chat) if self.chat else self.text
        return hashlib.sha256(text.strip().encode()).hexdigest()


def label_of(source: str, split: str | None) -> str:
    """The name that opens this split: `wikitext2:valid`."""
    return f"{source}:{split}" if split else source


@dataclass(frozen=True, eq=False)
class TextSource:
    """An ordered collection of documents, with the name the user gave."""

    name: str
    split: str | None
    documents: tuple[Document, ...]
    whole: bool = True  # False: only the first MOST_CHARACTERS were read
    warning: str = ""

    @property
    def label(self) -> str:
        return label_of(self.name, self.split)

    @property
    def note(self) -> str:
        """What the user should know."""
        if self.whole:
            return self.warning
        return f"{self.label} is long: its first {MOST_CHARACTERS:,} characters are used"

    def for_model(self, tokenizer: Any) -> TextSource:
        """With chats as the model's template writes them."""
        if not any(document.chat for document in self.documents):
            return self
        documents = [
            replace(document, text=templated(document.chat, tokenizer, document.name))
            if document.chat
            else document
            for document in self.documents
        ]
        warning = ""
        if not getattr(tokenizer, "chat_template", None):
            warning = f"{self.label} has chats and the model no chat template: role names stand before what is said"
        return replace(self, documents=tuple(documents), warning=warning)

    @cached_property
    def sha256(self) -> str:
        """Hash of the whole text with separators: equal hashes mean equal token streams."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(hashlib.sha256(piece.encode()).digest())
        return digest.hexdigest()

    def pieces(self) -> list[str]:
        """Each document's text with a blank line behind it; none after the last."""
        pieces = [document.text + PARAGRAPH_BREAK for document in self.documents[:-1]]
        return [*pieces, *(document.text for document in self.documents[-1:])]

    def joined(self) -> str:
        """All documents in order as one string."""
        return "".join(self.pieces())


def documents_of(contents: Iterable[tuple[str, str | Chat]]) -> Iterator[Document]:
    """Documents from names and texts or chats, without blank ones; raises TextError for what is not valid Unicode."""
    for name, content in contents:
        chat = () if isinstance(content, str) else content
        text = content if isinstance(content, str) else with_role_names(content)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can hold half a surrogate pair, which no tokenizer accepts.
            location = f"{name}: half a surrogate pair at character {error.start}"
            raise TextError(f"{location}: expected valid Unicode text") from None
        if text.strip():
            yield Document(name, text, chat)


def open_text(
    name: str | os.PathLike[str], *, for_evaluation: bool = False
) -> TextSource:
    """Opens a text by name (`wikitext2:train`), or by the path of a file or folder.

    Args:
        name: a known name, with or without `:split`, or a path.
        for_evaluation: default to the usual evaluation split instead of `train`.

    Raises:
        TextError: unknown name, or nothing readable.
    """
    name = os.fspath(name)
    base, _, split = name.partition(":")
    if base == WIKITEXT:
        return wikitext2(split or ("test" if for_evaluation else "train"))
    path = Path(name)
    looks_like_a_path = "/" in name or os.sep in name or path.suffix
    if not name or not (looks_like_a_path or path.exists()):
        raise TextError(
            f"{name or 'an empty name'}: no text of that name: use {WIKITEXT} "
            f"(`{WIKITEXT}:test` for a split), or the path of a file ({SUFFIXES}) or folder"
        )
    room = MOST_CHARACTERS
    documents = []
    for document in read_path(path):
        documents.append(replace(document, text=document.text[:room]))
        room -= len(document.text)
        if room < 0:
            break
    return TextSource(name, None, tuple(documents), whole=room >= 0)


# -- the user's files ----------------------------------------------------------------------------------------

# A .txt file is one document. In .json, .jsonl and .parquet every row is one: a text or a chat. Blank rows are skipped;
# rows with neither are an error, because they usually mean the wrong file.
Texts = Iterator[tuple[str, str | Chat]]  # where it is, and what is there
_FIELDS = ("text", "messages", "conversations", "prompt", "completion")


def read_path(path: Path) -> Iterator[Document]:
    """The documents of a file, or of every text file in a folder and its subfolders, sorted by path (without .json,
    which is often about a folder)."""
    if path.is_dir():
        within = {
            p: p.relative_to(path).parts
            for p in sorted(path.rglob("*"))
            if p.is_file() and _reader(p) and p.suffix.lower() != ".json"
        }
        paths = [
            p
            for p, parts in within.items()
            if not any(part.startswith(".") for part in parts)
        ]
        if not paths:
            raise TextError(f"{path}: no text files in this folder: expected {SUFFIXES}")
        yield from itertools.chain.from_iterable(map(read_path, paths))
        return
    if not path.exists():
        raise TextError(f"{path}: no such file or folder: check the path")
    reader = _reader(path)
    if reader is None:
        raise TextError(f"{path}: not a text file that can be read: use {SUFFIXES}")
    blank = True
    try:
        if not path.is_file():
            raise TextError(
                f"{path}: neither a file nor a folder: copy its text to a file"
            )
        empty = path.stat().st_size == 0
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise TextError(f"{path} {damage(path)}")
        for document in () if empty else documents_of(reader(path)):
            blank = False
            yield document
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror or error})") from None
    if blank:
        raise TextError(
            f"{path}: {'empty' if empty else 'holds only blank text'}: expected some text"
        )


def _reader(path: Path) -> Callable[[Path], Texts] | None:
    return next(
        (read for end, read in _READERS.items() if path.name.lower().endswith(end)), None
    )


def _read_txt(path: Path) -> Texts:
    with path.open("rb") as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        try:
            yield str(path), text.read(MOST_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            before = file.tell() - len(error.object)
            raise _not_utf8(error, str(path), before) from None


def _read_jsonl(path: Path) -> Texts:
    offset = 0
    with path.open("rb") as file:
        rows = iter(partial(file.readline, 4 * MOST_CHARACTERS), b"")
        for number, raw in enumerate(rows, start=1):
            location = f"{path}, line {number}"
            try:
                line = raw.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise _not_utf8(error, location, offset) from None
            offset += len(raw)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                expected = 'one object per line, such as {"text": …}'
                raise TextError(
                    f"{location}: not valid JSON ({error}): expected {expected}"
                ) from None
            yield location, content_of(row, location)


def _read_json(path: Path) -> Texts:
    """An array of rows, one row, or rows line by line."""
    with path.open("rb") as file:
        raw = file.read(4 * MOST_CHARACTERS + 1)
    if len(raw) > 4 * MOST_CHARACTERS:
        raise TextError(f"{path}: too large for .json: write a row per line, as .jsonl")
    try:
        rows = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error, str(path), 0) from None
    except (ValueError, RecursionError):
        yield from _read_jsonl(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        location = f"{path}, row {number}"
        yield location, content_of(row, location)


def _read_parquet(path: Path) -> Texts:
    number = 0
    try:
        file = pq.ParquetFile(path)
        columns = file.schema_arrow.names
        readable = [name for name in _FIELDS if name in columns]
        if not readable:
            content_of(dict.fromkeys(columns), str(path))
        for batch in file.iter_batches(1024, columns=readable):
            for row in batch.to_pylist():
                number += 1
                location = f"{path}, row {number}"
                yield location, content_of(row, location)
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: a column of text is not UTF-8 (byte {error.start} of a row)"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise TextError(
            f"{path} {damage(path)} (not a readable Parquet file: {one_line(error)})"
        ) from None


def _not_utf8(error: UnicodeDecodeError, location: str, before: int) -> TextError:
    """`before`: bytes of the file before what could not be decoded."""
    return TextError(
        f"{location}: not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {before + error.start} of the file): "
        "convert it first, for example with iconv"
    )


# In the order they are tried and listed in messages.
_READERS = {
    ".txt": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
SUFFIXES = ", ".join(_READERS)


# -- WikiText-2 ----------------------------------------------------------------------------------------------

WIKITEXT = "wikitext2"
# SHA-256 of the uncompressed files, so that a damaged copy is noticed.
_CHECKSUMS = {
    "train": "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
    "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
}
_TITLE = re.compile(r" = ([^=]+) = \n")


@lru_cache
def wikitext2(split: str = "train") -> TextSource:
    """WikiText-2 raw, from the shipped copy: 600 articles in `train`, 60 each in `valid` (or `validation`) and `test`.

    The published protocol takes the rows of the `datasets` library and joins the non-empty ones with two newlines. A
    row is a line of the file with its leading space and final newline, so three newlines separate two lines of the
    joined text. We keep this, because published figures on WikiText-2 use that text. One article is one document.
    """
    if split == "validation":
        return wikitext2("valid")
    if split not in _CHECKSUMS:
        raise TextError(
            f"{WIKITEXT}:{split}: no such split: use one of {', '.join(_CHECKSUMS)}"
        )
    articles = split_articles(raw_text(split).splitlines(keepends=True))
    documents = tuple(
        Document(
            f"{WIKITEXT}:{split}, article {number} ({title})", PARAGRAPH_BREAK.join(rows)
        )
        for number, (title, rows) in enumerate(articles, start=1)
    )
    return TextSource(WIKITEXT, split, documents)


def raw_text(split: str) -> str:
    path = reference_path("text", "wikitext2", f"wiki.{split}.raw.xz")
    try:
        raw = lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise TextError(f"{path}: damaged ({error}): reinstall kl-lens") from None
    if hashlib.sha256(raw).hexdigest() != _CHECKSUMS[split]:
        raise TextError(
            f"{path}: not the WikiText-2 {split} text (checksum differs): reinstall kl-lens"
        )
    return raw.decode()


def split_articles(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(title, non-empty lines including the title) of each article, in order.

    An article begins at a line ` = Title = ` with a blank line before and after it; without this rule, table legends
    such as ` = Goals ; A = ` would count as titles.
    """
    articles: list[tuple[str, list[str]]] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        title = _TITLE.fullmatch(line)
        around = [*lines[max(0, index - 1) : index], *lines[index + 1 : index + 2]]
        if title and not any(neighbour.strip() for neighbour in around):
            articles.append((title[1], []))
        if not articles:  # text before the first title; the shipped files have none
            articles.append(("untitled", []))
        articles[-1][1].append(line)
    return articles
