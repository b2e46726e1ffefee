"""WikiText-2 raw, from the copy that ships with the project.

**Lines.** The published protocol takes the rows of the `datasets` library and joins the non-empty ones with two
newlines. A row is a line of the file with its leading space and final newline, so three newlines separate two lines of
the joined text. We keep this, because published figures on WikiText-2 use that text.

**Documents.** One article is one document. An article begins at a line ` = Title = ` with a blank line before and after
it; without this rule, table legends such as ` = Goals ; A = ` would count as titles.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from functools import lru_cache

from kl_lens.base.errors import TextError
from kl_lens.base.resources import reference_path
from kl_lens.text.documents import PARAGRAPH_BREAK, Document, TextSource

NAME = "wikitext2"
# SHA-256 of the uncompressed files, so that a damaged copy is noticed.
_CHECKSUMS = {
    "train": "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
    "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
}
_TITLE = re.compile(r" = ([^=]+) = \n")


@lru_cache
def wikitext2(split: str = "train") -> TextSource:
    """WikiText-2 raw: 600 articles in `train`, 60 each in `valid` (or `validation`) and `test`."""
    if split == "validation":
        return wikitext2("valid")
    if split not in _CHECKSUMS:
        raise TextError(f"{NAME}:{split}: no such split: use one of {', '.join(_CHECKSUMS)}")
    articles = split_articles(raw_text(split).splitlines(keepends=True))
    documents = tuple(
        Document(f"{NAME}:{split}, article {number} ({title})", PARAGRAPH_BREAK.join(rows))
        for number, (title, rows) in enumerate(articles, start=1)
    )
    return TextSource(NAME, split, documents)


def raw_text(split: str) -> str:
    path = reference_path("text", "wikitext2", f"wiki.{split}.raw.xz")
    try:
        raw = lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise TextError(f"{path}: damaged ({error}): reinstall kl-lens") from None
    if hashlib.sha256(raw).hexdigest() != _CHECKSUMS[split]:
        raise TextError(f"{path}: not the WikiText-2 {split} text (checksum differs): reinstall kl-lens")
    return raw.decode()


def split_articles(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(title, non-empty lines including the title) of each article, in order."""
    articles: list[tuple[str, list[str]]] = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        title = _TITLE.fullmatch(line)
        around = [*lines[max(0, index - 1) : index], *lines[index + 1 : index + 2]]
        if title and not any(each.strip() for each in around):
            articles.append((title[1], []))
        if not articles:  # text before the first title; the shipped files have none
            articles.append(("untitled", []))
        articles[-1][1].append(line)
    return articles
