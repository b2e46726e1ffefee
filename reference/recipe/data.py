"""Reads the training archive and turns it into documents.

Only files named ``*.train.*`` feed training; the validation and test files are returned by
separate functions, so no call path leads from them into the training stream.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"

#: Share of training windows drawn from each source. WikiText-2 is small, so it is oversampled.
MIXTURE = {"enwik8": 0.50, "gutenberg": 0.32, "wikitext2": 0.18}

_WIKITEXT_TITLE = re.compile(r" = [^=]+ = \n")


class Corpus:
    """The text files of the training archive (a ``.tar.xz``, or the folder it unpacks to)."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, bytes] = {}
        if path.is_dir():
            for file in path.glob("text/*/*"):
                self._files["/".join(file.parts[-2:])] = file.read_bytes()
        else:
            with tarfile.open(
                fileobj=io.BytesIO(path.read_bytes()), mode="r:*"
            ) as archive:
                for member in archive:
                    parts = Path(member.name).parts
                    if member.isfile() and len(parts) >= 3 and parts[-3] == "text":
                        extracted = archive.extractfile(member)
                        assert extracted is not None
                        self._files["/".join(parts[-2:])] = extracted.read()
        if not self._files:
            raise SystemExit(
                f"{path}: no text/<source>/<file> entries found; expected the training archive"
            )

    def training_documents(self) -> dict[str, list[str]]:
        """Source name to its documents, in file order."""
        return {
            "enwik8": self._text("enwik8/enwik8_plain.train.txt").split("\n\n"),
            "gutenberg": self._books(),
            "wikitext2": wikitext_articles(self._text("wikitext-2/wiki.train.raw")),
        }

    def validation_texts(self) -> dict[str, str]:
        """Texts that choose the checkpoint; never trained on."""
        return {
            "wikitext2": join_wikitext(self._text("wikitext-2/wiki.valid.raw")),
            "enwik8": self._text("enwik8/enwik8_plain.valid.txt"),
        }

    def test_text(self) -> str:
        """WikiText-2 test, joined as the evaluation protocol joins it; scored once, at the end."""
        return join_wikitext(self._text("wikitext-2/wiki.test.raw"))

    def _text(self, name: str) -> str:
        if name not in self._files:
            raise SystemExit(
                f"the training archive has no text/{name}; it holds {sorted(self._files)}"
            )
        return self._files[name].decode("utf-8")

    def _books(self) -> list[str]:
        """Books lie end to end, separated by two newlines; the index holds their lengths in bytes."""
        raw = self._files["gutenberg/gutenberg_kg.train.txt"]
        books = []
        offset = 0
        for entry in json.loads(self._files["gutenberg/index.json"]):
            if entry["split"] == "train":
                books.append(raw[offset : offset + entry["bytes"]].decode("utf-8"))
                offset += entry["bytes"] + 2
        if offset - 2 != len(raw):
            raise SystemExit(
                "gutenberg/index.json does not add up to the length of the training file"
            )
        return books


def join_wikitext(raw: str) -> str:
    """The non-empty rows of a WikiText file, as they are (leading space and newline kept), joined by two newlines:
    the text that published WikiText-2 figures rest on, and the one `kl_lens.text` evaluates."""
    return "\n\n".join(line for line in raw.splitlines(keepends=True) if line.strip())


def wikitext_articles(raw: str) -> list[str]:
    """The same joined text, cut at the titles: rows `` = Title = `` between two blank ones."""
    articles: list[list[str]] = []
    rows = ["", *raw.splitlines(keepends=True), ""]
    for before, row, after in zip(rows, rows[1:], rows[2:], strict=False):
        if not row.strip():
            continue
        is_title = (
            _WIKITEXT_TITLE.fullmatch(row) and not before.strip() and not after.strip()
        )
        if is_title or not articles:
            articles.append([])
        articles[-1].append(row)
    return ["\n\n".join(article) for article in articles]
