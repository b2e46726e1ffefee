"""WikiText-2 ships with the project, whole, and is joined as the published protocol joins it."""

import lzma

import numpy as np
import pytest

from kl_lens.base.files import reference_path
from kl_lens.text.sources import wikitext2
from kl_lens.text.windows import token_stream


@pytest.mark.parametrize(
    ("split", "articles", "lines"),
    [("train", 600, 36718), ("valid", 60, 3760), ("test", 60, 4358)],
)
def test_each_split_is_the_published_text(split: str, articles: int, lines: int) -> None:
    """The rows of `datasets` are the file's lines, newline included; the non-empty ones are joined."""
    with lzma.open(
        reference_path("text", "wikitext2", f"wiki.{split}.raw.xz"),
        "rt",
        encoding="utf-8",
    ) as file:
        rows = list(file)
    assert (len(wikitext2(split).documents), len(rows)) == (articles, lines)
    assert wikitext2(split).joined() == "\n\n".join(row for row in rows if row.strip())


def test_tokens_of_the_documents_are_the_tokens_of_the_joined_text(tokenizer) -> None:
    source = wikitext2("valid")
    in_one_go = tokenizer.encode(source.joined(), add_special_tokens=False).ids
    assert np.array_equal(token_stream(source, tokenizer).ids, in_one_go)
