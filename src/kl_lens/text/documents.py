"""Documents and the sources that hold them.

A document is the unit that calibration and evaluation must never share: a Wikipedia article, a row of a JSONL or
Parquet file, a whole text file. It is known by the hash of its text, so that a copied file is the same document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kl_lens.base.errors import TextError

PARAGRAPH_BREAK = "\n\n"


@dataclass(frozen=True)
class Document:
    name: str  # where it comes from, for messages: "wikitext2:test, article 3 (Du Fu)", "notes.jsonl, line 7"
    text: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the stripped text: a trailing newline makes no new document."""
        return hashlib.sha256(self.text.strip().encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class TextSource:
    """An ordered collection of documents, with the name the user gave."""

    name: str
    split: str | None
    documents: tuple[Document, ...]

    @property
    def label(self) -> str:
        return f"{self.name}:{self.split}" if self.split else self.name

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


def documents_of(texts: Iterable[tuple[str, str]]) -> Iterator[Document]:
    """Documents from (name, text), without blank ones; raises TextError for what is not valid Unicode."""
    for name, text in texts:
        try:
            text.encode()
        except (
            UnicodeEncodeError
        ) as error:  # JSON can contain half a surrogate pair, which no tokenizer accepts
            raise TextError(
                f"{name}: half a surrogate pair at character {error.start}: expected valid Unicode text"
            ) from None
        if text.strip():
            yield Document(name, text)
